import sys, time, torch, flashsci
def host(f, n=400):
    for _ in range(50): f()
    torch.cuda.synchronize(); ts=[]
    for _ in range(n):
        t=time.perf_counter(); f(); ts.append(time.perf_counter()-t)
        if _ % 50 == 49: torch.cuda.synchronize()
    ts.sort(); return ts[len(ts)//2]*1e6
x=[torch.randn(1,4,256,64,device="cuda",dtype=torch.bfloat16) for _ in range(3)]
(q,qs),(k,ks),(v,vs)=[tuple(flashsci.quantize(t,"head"))[:2] for t in x]
p=[t[0].transpose(0,1).contiguous() for t in (q,k,v)]; cu=torch.tensor([0,100,256],dtype=torch.int32,device="cuda")
for backend in sys.argv[1:]:
    for name,f in (("scales",lambda: flashsci.attention(q,k,v,q_scale=qs,k_scale=ks,v_scale=vs,backend=backend)),("no scales",lambda: flashsci.attention(q,k,v,backend=backend)),("packed",lambda: flashsci.varlen_attention(*p,cu,max_seqlen_q=156,max_seqlen_k=156,backend=backend))):
        print(f"8-bit host {backend} {name}: {host(f):.1f} us")
