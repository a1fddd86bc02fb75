import struct, sys
data=bytearray(open('_C.so','rb').read())
pos=0; kept=dropped=0; n=0; archs={}
while True:
    i=data.find(b'\x50\xed\x55\xba',pos)
    if i<0: break
    magic,ver,hsize,fsize=struct.unpack_from('<IHHQ',data,i)
    if hsize!=16 or ver!=1 or fsize>1<<30 or i+16+fsize>len(data): pos=i+4; continue
    e=i+16; end=i+16+fsize
    while e+64<=end:
        kind,v,eh,psize=struct.unpack_from('<HHIQ',data,e)
        arch,=struct.unpack_from('<I',data,e+28)
        if eh<32 or eh>4096 or e+eh+psize>end: break
        key=(kind,arch); a=archs.setdefault(key,[0,0]); a[0]+=1; a[1]+=psize
        e+=eh+psize
    pos=end; n+=1
print(n,archs)
pos=0
while True:
    i=data.find(b'\x50\xed\x55\xba',pos)
    if i<0: break
    magic,ver,hsize,fsize=struct.unpack_from('<IHHQ',data,i)
    if hsize!=16 or ver!=1 or fsize>1<<30 or i+16+fsize>len(data): pos=i+4; continue
    e=i+16; end=i+16+fsize
    while e+64<=end:
        kind,v,eh,psize=struct.unpack_from('<HHIQ',data,e)
        arch,=struct.unpack_from('<I',data,e+28)
        if eh<32 or eh>4096 or e+eh+psize>end: break
        if arch==80: data[e+eh:e+eh+psize]=bytes(psize)
        e+=eh+psize
    pos=end
open('_C90.so','wb').write(data)
