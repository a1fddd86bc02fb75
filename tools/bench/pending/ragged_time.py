"""cuda and Triton on biases of packed calls and on learnt slopes; us of loops of 20, medians."""
import statistics as st, time, torch, flashsci
torch.manual_seed(0)
def loop(f,n=20):
    f(); torch.cuda.synchronize(); a=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.perf_counter()-a)/n*1e6
def med(fs,rounds=9):
    for f in fs.values(): f(); f()
    r={k:[] for k in fs}
    for _ in range(rounds):
        for k,f in fs.items(): r[k].append(loop(f))
    return {k:round(st.median(v)) for k,v in r.items()}
for name,N,lo,hi,H,D,dt,Hb in (("crystals fp32",256,3,318,8,32,torch.float32,8),("crystals bf16",256,3,318,8,32,torch.bfloat16,8),("proteins bf16",16,100,1200,16,64,torch.bfloat16,16),("proteins bf16 shared",16,100,1200,16,64,torch.bfloat16,1)):
    lens=torch.randint(lo,hi,(N,)); cu=torch.cat([torch.zeros(1,dtype=torch.int64),lens.cumsum(0)]).int().cuda(); T=int(lens.sum()); pairs=int((lens**2).sum())
    q,k,v=(torch.randn(T,H,D,device="cuda",dtype=dt,requires_grad=True) for _ in range(3))
    bias=torch.randn(Hb,pairs,device="cuda",dtype=dt,requires_grad=True); g=torch.randn(T,H,D,device="cuda",dtype=dt)
    fs={}
    for b in ("cuda","triton"):
        def fwd(b=b):
            with torch.no_grad(): return flashsci.varlen_attention(q,k,v,cu,max_seqlen_q=hi,max_seqlen_k=hi,bias=bias,backend=b)
        def step(b=b):
            return torch.autograd.grad(flashsci.varlen_attention(q,k,v,cu,max_seqlen_q=hi,max_seqlen_k=hi,bias=bias,backend=b),(q,k,v,bias),g)
        fs[b+" fwd"]=fwd; fs[b+" step"]=step
    try: print(name,T,pairs,med(fs),flush=True)
    except Exception as e: print(name,repr(e)[:300],flush=True)
for B,H,S,D,dt in ((4,16,1024,64,torch.bfloat16),(2,16,2048,128,torch.bfloat16),(4,16,1024,64,torch.float32)):
    q,k,v=(torch.randn(B,H,S,D,device="cuda",dtype=dt,requires_grad=True) for _ in range(3)); sl=torch.rand(H,device="cuda",requires_grad=True); g=torch.randn(B,H,S,D,device="cuda",dtype=dt)
    fs={}
    for b in ("cuda","triton"):
        fs[b]=lambda b=b: torch.autograd.grad(flashsci.attention(q,k,v,alibi_slopes=sl,causal=True,backend=b),(q,k,v,sl),g)
    try: print("slopes",B,H,S,D,dt,med(fs,5),flush=True)
    except Exception as e: print("slopes",repr(e)[:300],flush=True)
