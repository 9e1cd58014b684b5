import torch
def build(block_table, seq_lens, num_nodes, tree, bs, idx):
    items=[]
    for b in idx:
        n=int(num_nodes[b]); L=int(seq_lens[b]); base=L-n
        pos=torch.arange(L); blocks=block_table[b][pos//bs].long(); off=pos%bs
        mask=torch.zeros(n,L,dtype=torch.bool); mask[:,:base]=True; mask[:,base:]=tree.ancestors[b,:n,:n]
        d=tree.depths[b,:n]
        kp=torch.cat([torch.arange(base), base+d]); qp=base+d
        items.append((n,L,blocks,off,mask,qp,kp))
    return items
def attn(q, kv, items, scale, softcap, window, out):
    nb,H,bs,D2=kv.shape; D=D2//2
    v2=kv.view(nb,H,2*bs,D); kc,vc=v2.chunk(2,dim=2)
    kc=kc.as_strided((nb,H,D,bs),(kc.stride(0),kc.stride(1),bs,1))
    r=0
    for n,L,blocks,off,mask,qp,kp in items:
        K=kc[blocks,:,:,off].float() # [L,H,D]
        V=vc[blocks,:,off].float()
        Q=q[r:r+n].float(); G=Q.shape[1]//H
        s=torch.einsum('nhgd,lhd->hgnl',Q.view(n,H,G,D),K)*scale
        if softcap: s=softcap*torch.tanh(s/softcap)
        m=mask
        if window>0: m=m&(kp[None]>qp[:,None]-window)
        s=s.masked_fill(~m,-1e30).softmax(-1)
        o=torch.einsum('hgnl,lhd->nhgd',s,V)
        out[r:r+n]=o.reshape(n,H*G,D).to(out.dtype); r+=n
