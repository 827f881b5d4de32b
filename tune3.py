import os, sys, time, subprocess, torch, warnings
warnings.filterwarnings('ignore')
sys.path.insert(0, '.')
from sparse_eval.kernels.sparse_decode.launch import sparse_decode_triton
from sparse_eval.kernels.quest_select.launch import quest_select_triton
dev = 'cuda'; H, G, D = 12, 2, 128; sc = D**-.5
CELLS = [(1,16384,64),(1,65536,64),(8,65536,64),(32,65536,64),(32,65536,16),(1,65536,16)]
SEL = [(bp,m,st,w,cw) for bp,st,w in [(16,4,4),(32,3,4),(32,4,4),(64,2,4),(64,3,4),(64,3,8),(128,2,8)] for m in (2,4,8) for cw in (4,)]
CH = (1,2,4,8,16)
def bufs(B, N, R, page):
    out = []
    for _ in range(R):
        k = torch.randn(B,G,N,D,device=dev,dtype=torch.bfloat16); v = torch.randn(B,G,N,D,device=dev,dtype=torch.bfloat16)
        x = k.unflatten(2,(N//page,page)); lo, hi = x.amin(3).float(), x.amax(3).float()
        out.append(dict(q=torch.randn(B,H,D,device=dev,dtype=torch.bfloat16),k=k,v=v,mid=((lo+hi)/2).bfloat16(),half=((hi-lo)/2).bfloat16().contiguous()))
    return out
def gtime(fn, bs, reps=15):
    fn(bs[0]); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph(); n=max(1,-(-24//len(bs)))
    with torch.cuda.graph(g):
        for _ in range(n):
            for b in bs: fn(b)
    ts = []
    for i in range(reps+3):
        a, z = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); z.record(); torch.cuda.synchronize()
        if i > 2: ts.append(a.elapsed_time(z)*1e3/len(bs)/n)
    return sorted(ts)[len(ts)//2]
def nb(B,N,page,bp,m): return max(1,min(-(-(N//page)//bp), -(-132*m//(B*G))))
def sel(b, L, page, s, B, N, update=True): return quest_select_triton(b['q'],b['k'],b['mid'],b['half'],None,L,update=update,block_p=s[0],num_blocks=nb(B,N,page,s[0],s[1]),score_stages=s[2],score_warps=s[3],choose_warps=s[4],page_size=page,budget=2048,sink_pages=1,local_pages=2,group='max',scale=sc)
def att(b, L, page, p, c, a, ns, chained=False): return sparse_decode_triton(b['q'],b['k'],b['v'],p,c,None,L,page_size=page,scale=sc,num_splits=ns,chained=chained,**a)
if len(sys.argv) > 1:
    w, n = int(sys.argv[1]), int(sys.argv[2]); jobs = []
    for page in (64,16):
        for N in (16384,65536):
            b = bufs(1,N,1,page)[0]; L = torch.full((1,),N,dtype=torch.int32,device=dev)
            jobs += [lambda b=b,L=L,page=page,s=s,N=N: sel(b,L,page,s,1,N) for s in SEL if s[1]==2]
            jobs += [lambda b=b,L=L,page=page,c=c,N=N: sel(b,L,page,(64,4,3,4,c),1,N) for c in CH]
    for i,j in enumerate(jobs):
        if i % n == w: j()
    torch.cuda.synchronize(); sys.exit()
t0=time.time()
ps=[subprocess.Popen([sys.executable,__file__,str(i),'13']) for i in range(13)]
r=subprocess.run([sys.executable,'/dev/stdin'],stdin=open('t_sel.py'),env=os.environ|{'TRITON_INTERPRET':'0','DEV':'cuda'},capture_output=True,text=True); print('correct:',r.stdout[-200:],r.stderr[-1500:])
[p.wait() for p in ps]; print('warm',round(time.time()-t0),flush=True)
for B,N,page in CELLS:
    step_bytes = B*G*(2048*D*4 + N//page*D*4); R = max(2,min(48,-(-int(2.4e8)//step_bytes)))
    bs = bufs(B,N,R,page); L = torch.full((B,),N,dtype=torch.int32,device=dev)
    res={}
    res['sel']=[(round(gtime(lambda b: sel(b,L,page,s,B,N),bs),1),s) for s in SEL]
    s0=sorted(res['sel'])[0][1]
    res['choose']=[(round(gtime(lambda b: sel(b,L,page,s0[:4]+(c,),B,N),bs),1),c) for c in CH]
    s0=s0[:4]+(sorted(res['choose'])[0][1],)
    res['sel_noupd']=[(round(gtime(lambda b: sel(b,L,page,s0,B,N,False),bs),1),s0)]
    res['step']=[]
    for bt,st,w,ns in {1:[(64,3,4,32),(64,2,4,32),(32,4,4,32)],8:[(64,4,4,8),(64,3,4,8),(64,3,4,16)],32:[(64,3,4,4),(64,3,4,8),(32,4,4,8),(64,4,4,2)]}[B]:
        def f(b):
            p,c=sel(b,L,page,s0,B,N); return att(b,L,page,p,c,dict(block_t=bt,num_stages=st,num_warps=w),ns,True)
        res['step'].append((round(gtime(f,bs),1),bt,st,w,ns))
    print(B,N,page,'R',R,'floor',round(step_bytes/4.3e6,1))
    for k,v in res.items(): print('  ',k,'; '.join(str(x).replace(' ','') for x in sorted(v)[:6]),'| worst',sorted(v)[-1][0],flush=True)
    from torch.profiler import profile, ProfilerActivity as A
    for _ in range(2):
        with profile(activities=[A.CUDA]) as pr:
            for b in bs: f(b)
            torch.cuda.synchronize()
    print('  prof', {e.key[:12]: round(e.device_time_total/e.count,2) for e in pr.key_averages() if e.count>=len(bs)},flush=True)
    del bs; torch.cuda.empty_cache()
print('total',time.time()-t0)
