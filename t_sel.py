import os
import sys; sys.path.insert(0,".")

import torch
from sparse_eval.core import AttentionCall
from sparse_eval.policies.quest import Quest
from sparse_eval.kernels.quest_select.launch import *
from sparse_eval.kernels.quest_step import quest_step as qs
def quest_step_triton(*a,**k): return qs(*a,backend="triton",**k)
from sparse_eval.kernels.sparse_decode import sparse_decode
def test(dtype, group, page, sizes, integer=True, B=2,G=2,M=3,D=24,N=200,budget=64,lens=None,dev=os.environ.get("DEV","cpu"), padded=False):
    torch.manual_seed(0)
    mk = (lambda *s: torch.randint(-2,3,s,device=dev).to(dtype)) if integer else (lambda *s: torch.randn(s,device=dev).to(dtype))
    q,k,v=mk(B,G*M,D),mk(B,G,N,D),mk(B,G,N,D)
    starts=torch.tensor([3]*B,dtype=torch.int32,device=dev) if padded else None
    p=Quest(page_size=page,sink_pages=1,local_pages=2,group=group)
    for L in sizes:
        lengths=torch.tensor([L]+[max(0,L-7)]*(B-1),dtype=torch.int32,device=dev)
        call=AttentionCall(q_BHD=q,k_BGND=k,v_BGNE=v,lengths_B=lengths,starts_B=starts,scale=0.25,layer=0,step=0,max_tokens=N)
        st=p.init(call); want=p.select(call,st,budget)
        mid,half=st.center_BGPD.clone(),st.spread_BGPD.clone()
        # damage the newest full page's metadata of rows whose page just filled
        for b in range(B):
            n=int(lengths[b])
            if n%page==0 and n: mid[b,:,n//page-1]=99; half[b,:,n//page-1]=77
        kw=dict(page_size=page,budget=budget,sink_pages=1,local_pages=2,group=group,scale=0.25)
        m1,h1=mid.clone(),half.clone()
        pages,counts=quest_select_triton(q,k,m1,h1,starts,lengths,update=True,block_p=16,num_blocks=2,**kw)
        n=int(lengths.max())//page
        for b in range(B):
            nf=int(lengths[b])//page
            assert torch.equal(m1[b,:,:nf],st.center_BGPD[b,:,:nf]),(L,b)
            assert torch.equal(h1[b,:,:nf],st.spread_BGPD[b,:,:nf]),(L,b)
        if integer:
            assert torch.equal(pages,want.pages_BSK),(L,pages,want.pages_BSK); assert torch.equal(counts,want.counts_BS)
        m2,h2=mid.clone(),half.clone()
        for rep in range(2):
            out,lse,pg,ct=quest_step_triton(q,k,v,m2,h2,starts,lengths,**kw)
            assert torch.equal(pg,pages) and torch.equal(ct,counts)
        o,l=sparse_decode(q,k,v,pages,counts,starts,lengths,page_size=page,scale=.25,backend="torch")
        torch.testing.assert_close(out.float(),o.float(),atol=2e-2 if dtype!=torch.float32 else 1e-5,rtol=0); torch.testing.assert_close(lse,l,atol=1e-5,rtol=1e-5)
for dtype in (torch.float32,torch.bfloat16,torch.float16):
    test(dtype,"max",16,[1,16,40,64,65,96,150])
    test(dtype,"sum",16,[97,128,150],padded=True)
    test(dtype,"max",16,[96,128],integer=False)
print("ok")
