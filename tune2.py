import os, sys, time, subprocess, torch, warnings
warnings.filterwarnings('ignore')
sys.path.insert(0, '.')
from sparse_eval.kernels.sparse_decode.launch import sparse_decode_triton
from sparse_eval.kernels.quest_select.launch import quest_select_triton
dev = 'cuda'; H, G, D = 12, 2, 128; sc = D**-.5
CELLS = [(1,16384,64),(1,65536,64),(8,65536,64),(32,65536,64),(32,131072,64),(32,65536,16),(1,65536,16)]
ATT = [dict(block_t=bt,num_stages=st,num_warps=w) for bt,st,w in [(32,3,4),(32,4,4),(32,6,4),(64,2,4),(64,3,4),(64,4,4),(64,3,8),(64,4,8),(128,2,4),(128,3,8)]]
SEL = [(16,1),(16,4),(32,2),(32,4),(64,2),(64,4),(64,8),(128,4)]
def bufs(B, N, R, page):
    out = []
    for _ in range(R):
        k = torch.randn(B,G,N,D,device=dev,dtype=torch.bfloat16); v = torch.randn(B,G,N,D,device=dev,dtype=torch.bfloat16)
        x = k.unflatten(2,(N//page,page)); lo, hi = x.amin(3).float(), x.amax(3).float()
        out.append(dict(q=torch.randn(B,H,D,device=dev,dtype=torch.bfloat16),k=k,v=v,mid=((lo+hi)/2).bfloat16(),half=((hi-lo)/2).bfloat16().contiguous()))
    return out
def gtime(fn, bs, reps=15):
    fn(bs[0]); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for b in bs: fn(b)
    ts = []
    for i in range(reps+3):
        a, z = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); z.record(); torch.cuda.synchronize()
        if i > 2: ts.append(a.elapsed_time(z)*1e3/len(bs))
    return sorted(ts)[len(ts)//2]
def sel(b, L, page, s, update=True): return quest_select_triton(b['q'],b['k'],b['mid'],b['half'],None,L,update=update,block_p=s[0],choose_warps=s[1],page_size=page,budget=2048,sink_pages=1,local_pages=2,group='max',scale=sc)
def att(b, L, page, p, c, a, ns, chained=False): return sparse_decode_triton(b['q'],b['k'],b['v'],p,c,None,L,page_size=page,scale=sc,num_splits=ns,chained=chained,**a)
if len(sys.argv) > 1:
    w, n = int(sys.argv[1]), int(sys.argv[2]); jobs = []
    for page in (64,16):
        for N in (16384,65536,131072):
            b = bufs(1,N,1,page)[0]; L = torch.full((1,),N,dtype=torch.int32,device=dev); p,c = sel(b,L,page,(64,4))
            jobs += [lambda b=b,L=L,page=page,s=s,u=u: sel(b,L,page,s,u) for s in SEL for u in (True,False)]
            if N==65536: jobs += [lambda b=b,L=L,page=page,a=a,p=p,c=c,ch=ch: att(b,L,page,p,c,a,16,ch) for a in ATT for ch in (0,1)]
    for i,j in enumerate(jobs):
        if i % n == w: j()
    torch.cuda.synchronize(); sys.exit()
t0=time.time()
ps=[subprocess.Popen([sys.executable,__file__,str(i),'13']) for i in range(13)]
r=subprocess.run([sys.executable,'/dev/stdin'],stdin=open('t_sel.py'),env=os.environ|{'TRITON_INTERPRET':'0','DEV':'cuda'},capture_output=True,text=True); print('correct:',r.stdout[-200:],r.stderr[-1500:])
[p.wait() for p in ps]; print('warm',round(time.time()-t0),flush=True)
for B,N,page in CELLS:
    step_bytes = B*G*(2048*D*4 + N//page*D*4); R = max(2,min(48,-(-int(2.4e8)//step_bytes)))
    bs = bufs(B,N,R,page); L = torch.full((B,),N,dtype=torch.int32,device=dev); W=2048//page
    P = torch.rand(B,G,N//page,device=dev).argsort(-1)[...,:W].sort(-1).values.int().contiguous(); C = torch.full((B,G),W,dtype=torch.int32,device=dev)
    res={'att':[],'sel':[],'step':[],'stepnoupd':[]}
    for s in SEL: res['sel'].append((round(gtime(lambda b: sel(b,L,page,s),bs),1),s)); 
    best_sel=sorted(res['sel'])[0][1]; res['sel_noupdate']=[(round(gtime(lambda b: sel(b,L,page,best_sel,False),bs),1),best_sel)]
    for a in ATT:
        for ns in {1:(8,16,32),8:(4,8,16),32:(2,4,8)}[B]:
            res['att'].append((round(gtime(lambda b: att(b,L,page,P,C,a,ns),bs),1),tuple(a.values()),ns))
    for t,av,ns in sorted(res['att'])[:5]:
        a=dict(zip(('block_t','num_stages','num_warps'),av))
        for s in [x[1] for x in sorted(res['sel'])[:2]]:
            def f(b,u=True):
                p,c=sel(b,L,page,s,u); return att(b,L,page,p,c,a,ns,True)
            res['step'].append((round(gtime(f,bs),1),av,ns,s)); res['stepnoupd'].append((round(gtime(lambda b:f(b,False),bs),1),av,ns,s))
    print(B,N,page,'R',R,'floor',round(step_bytes/4.3e6,1))
    for k,v in res.items(): print('  ',k,'; '.join(str(x).replace(' ','') for x in sorted(v)[:5]),'| worst',sorted(v)[-1][0],flush=True)
    if (B,N) in ((1,65536),(32,65536)):
        from torch.profiler import profile, ProfilerActivity as A
        for _ in range(2):
            with profile(activities=[A.CUDA]) as pr:
                for b in bs: f(b)
                torch.cuda.synchronize()
        print('  prof', {e.key[:20]: round(e.device_time_total/e.count,2) for e in pr.key_averages() if e.count>=len(bs)},flush=True)
    del bs; torch.cuda.empty_cache()
print('total',time.time()-t0)
