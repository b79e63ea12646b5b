import torch, time, random, json, sys, argparse
from tunesmith.tasks.world import World, WorldConfig
from tunesmith.tasks.world.expert import iter_plans, build_plan
def convs_long(num_docs, num, seed, kinds=None, min_hops=1, max_hops=1, split="train", num_test=0):
    cfg = WorldConfig(num_documents=num_docs, num_train=num if split=="train" else 100, num_test=num_test if split=="train" else num, seed=seed, max_hops=max_hops,min_hops=min_hops,
        distractors_per_entity=0, num_wordings=int(__import__("os").environ.get("WORDINGS","1")), kind_shares=kinds or {"multi_hop":1.0})
    w = World(config=cfg)
    out=[]
    cache={}
    for region, q in w.iter_questions_by_region(split):
        if region.number not in cache:
            cache={region.number: w.build_passages(region)}
        docs=cache[region.number]
        plan=build_plan(q, region)
        parts=[(f"<|im_start|>user\n{q.question}<|im_end|>\n<|im_start|>assistant\n",0)]
        ok=True
        for l in plan.lookups:
            parts.append((f"<think>{l.thought}</think>\n<search>{l.query}</search>",1))
            d=next((d for d in docs if (d.title in l.query or (l.evidence[0] in d.text and any(x in d.text for x in [l.query.split()[-1]]))) and all(e in d.text for e in l.evidence)),None)
            if d is None: ok=False;break
            parts.append((f"\n<result>\n{d.title}\n{d.text}\n</result>\n",0))
        if not ok: continue
        if plan.computation:
            parts.append((f"<think>{plan.computation_thought}</think>\n<python>print({plan.computation})</python>",1))
            parts.append((f"\n<result>\n{plan.answer}\n</result>\n",0))
        parts.append((f"<think>{plan.conclusion}</think>\n<answer>\\boxed{{{plan.answer}}}</answer><|im_end|>\n",1))
        out.append(parts)
    return out

from tunesmith.tasks.world.schema import RELATIONS

def short(f):
    t=RELATIONS[f.relation].statements[0].format(s="it",v=f.value); return t[0].upper()+t[1:]
def convs(num_docs, num, seed, kinds=None, min_hops=1, max_hops=1, split="train", pairs=0):
    cfg = WorldConfig(num_documents=num_docs, num_train=num if split=="train" else 100, num_test=0, seed=seed, max_hops=max_hops,min_hops=min_hops,
        distractors_per_entity=0, num_wordings=int(__import__("os").environ.get("WORDINGS","1")), kind_shares=kinds or {"multi_hop":1.0})
    w = World(config=cfg); out=[]; cache={}
    for region, q in w.iter_questions_by_region(split):
        if region.number not in cache: cache={region.number: w.build_passages(region)}
        docs=cache[region.number]; plan=build_plan(q, region)
        parts=[(f"<|im_start|>user\n{q.question}<|im_end|>\n<|im_start|>assistant\n",0)]
        learned=""; ok=True; facts=list(q.facts)
        for l in plan.lookups:
            parts.append((f"<think>{learned or 'I look it up.'}</think>\n<search>{l.query}</search>",1))
            if len(out)<pairs: break
            d=next((d for d in docs if d.title in l.query and all(e in d.text for e in l.evidence)),None) or next((d for d in docs if l.query.split()[-1] in d.text and all(e in d.text for e in l.evidence)),None)
            if d is None: ok=False;break
            parts.append((f"\n<result>\n{d.title}\n{d.text}\n</result>\n",0))
            fs=[f for f in d.facts if f in facts]
            learned=" ".join(short(f) for f in fs)
        else:
            if plan.computation:
                parts.append((f"<think>{learned}</think>\n<python>print({plan.computation})</python>",1))
                parts.append((f"\n<result>\n{plan.answer}\n</result>\n",0)); learned="That is it."
            parts.append((f"<think>{learned}</think>\n<answer>\\boxed{{{plan.answer}}}</answer><|im_end|>\n",1))
        if ok: out.append(parts)
    return out
from tunesmith.model import pocket
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
p=argparse.ArgumentParser()
p.add_argument("--docs",type=int,default=30000); p.add_argument("--num",type=int,default=6000); p.add_argument("--lr",type=float,default=3e-3)
p.add_argument("--all",type=float,default=0.0); p.add_argument("--theta",type=float,default=500.); p.add_argument("--layers",type=int,default=3); p.add_argument("--hidden",type=int,default=192)
p.add_argument("--tokens",type=int,default=4096); p.add_argument("--seconds",type=float,default=240); p.add_argument("--vocab",type=int,default=768); p.add_argument("--tok",default="bpe"); p.add_argument("--init",type=float,default=0.06); p.add_argument("--warm",type=int,default=20); p.add_argument("--every",type=int,default=50)
p.add_argument("--kinds",default="{\"multi_hop\":1.0}"); p.add_argument("--hops",type=int,default=1); p.add_argument("--pure",type=int,default=0); p.add_argument("--epochs",type=int,default=1)
p.add_argument("--headdim",type=int,default=32); p.add_argument("--long",type=int,default=0); p.add_argument("--pairs",type=int,default=0); p.add_argument("--name",default="x"); p.add_argument("--kv",type=int,default=0)
a=p.parse_args()
torch.manual_seed(0); torch.set_num_threads(1)
pocket.VOCABULARY_SIZE=a.vocab; pocket.ROPE_THETA=a.theta; pocket.INITIALIZER_RANGE=a.init
train=(convs_long if a.long else convs)(a.docs,a.num,0,json.loads(a.kinds),max_hops=a.hops,**({} if a.long else {'pairs':a.pairs})); test=(convs_long if a.long else convs)(400,150,777,json.loads(a.kinds),max_hops=a.hops)
text="\n".join(t.replace("<think>","").replace("</think>","") for c in train[-2000:] for t,_ in c)
for s in ("<|im_start|>","<|im_end|>"): text=text.replace(s,"")
if a.tok=="cap":  # syllables: consonants+vowels units in capitalised words
    pocket.WORDS=r'\{"[^\d\n]*| [-+*/] \(?| (?=\p{Lu})|\p{Lu}\p{Ll}*| ?\p{L}+(?: $|\n)?|,? $|\n+|[^\s\p{L}]+|\s+'
if a.tok=="names":
    pocket.WORDS=r'\{"[^\d\n]*| [-+*/] \(?|\p{Lu}\p{Ll}*(?: (?=\p{Lu}))?| ?\p{Ll}+(?: $| (?=\p{Lu})|\n)?|[,.:]? (?=\p{Lu})|,? $|\n+|[^\s\p{L}]+|\s+'
if a.tok=="syl":
    pocket.WORDS=r'\{"[^\d\n]*| [-+*/] \(?| ?\p{Lu}?[bcdfghjklmnpqrstvwxyz]*[aeiouy]+|[bcdfghjklmnpqrstvwxyz]+| ?\p{L}+(?: $|\n)?|,? $|\n+|[^\s\p{L}]+|\s+'
tok=build_pocket_tokenizer(text)
import tunesmith.model.pocket as pm
_L=pm.LlamaConfig
pm.LlamaConfig=lambda **k: _L(**{**k,"num_attention_heads":a.hidden//a.headdim,"num_key_value_heads":a.kv or a.hidden//a.headdim,"head_dim":a.headdim})
model=build_pocket_model(tok,hidden_size=a.hidden,num_layers=a.layers)
def enc(c):
    ids=[];m=[];spans=[]
    for t,w in c:
        x=tok.encode(t,add_special_tokens=False); ids+=x; m+=[w]*len(x)
    return ids,m
T=[enc(c) for c in train]; V=[enc(c) for c in test]
for t,_ in test[0]: print("|".join(tok.decode([i]) for i in tok.encode(t,add_special_tokens=False)))
print("len",sum(len(x[0]) for x in T)/len(T),"trained",sum(sum(x[1]) for x in T)/len(T),"params",model.num_parameters(),flush=True)
rng=random.Random(0)
def batches(data):
    order=list(range(len(data))); rng.shuffle(order)
    for s in range(0,len(order),256):
        chunk=sorted(order[s:s+256],key=lambda i:len(data[i][0])); bs=[];b=[]
        for i in chunk:
            if b and (len(b)+1)*len(data[i][0])>a.tokens: bs.append(b);b=[]
            b.append(i)
        bs.append(b); rng.shuffle(bs); yield from bs
def pad(rows):
    L=max(len(r[0]) for r in rows)
    return torch.tensor([r[0]+[0]*(L-len(r[0])) for r in rows]),torch.tensor([r[1]+[-1]*(L-len(r[1])) for r in rows])
@torch.no_grad()
def evaluate():
    q=an=both=qs=0;fails=[]
    for s in range(0,len(V),20):
        ids,m=pad(V[s:s+20]); pr=model(input_ids=ids).logits[:,:-1].argmax(-1); ok=(pr==ids[:,1:]); mm=m[:,1:]
        for j in range(len(ids)):
            # segments
            row=mm[j].tolist(); o=ok[j].tolist(); segs=[];cur=None
            for k,(w,x) in enumerate(zip(row,o)):
                if w==1:
                    if cur is None: cur=[]
                    cur.append(x)
                elif cur is not None: segs.append(all(cur)); cur=None
            if cur is not None: segs.append(all(cur))
            q+=segs[0]; an+=segs[-1]; both+=all(segs)
            if not all(segs) and len(fails)<12:
                fails.append(tok.decode(ids[j].tolist()).replace("<|endoftext|>","")+" ## "+" ".join(f"{tok.decode([ids[j,k+1]])}->{tok.decode([pr[j,k]])}" for k in range(len(o)) if row[k]==1 and not o[k]))
    return q/len(V),an/len(V),both/len(V),fails
dec=[x for x in model.parameters() if x.dim()>1]; no=[x for x in model.parameters() if x.dim()<=1]
opt=torch.optim.AdamW([{"params":dec,"weight_decay":0.01},{"params":no,"weight_decay":0}],lr=a.lr,betas=(0.9,0.95))
import itertools
allb=([b for b in batches(T[:a.pairs])] if a.pairs else [])+[[i+a.pairs for i in b] for _ in range(a.epochs) for b in batches(T[a.pairs:])]; total=len(allb)
t0=time.time();c0=time.process_time();n=0;step=0
import math
for step,b in enumerate(allb):
    frac=step/total; lr=a.lr*min(1,(step+1)/a.warm)*(0.1+0.9*0.5*(1+math.cos(math.pi*frac)))
    for g in opt.param_groups: g["lr"]=lr
    ids,m=pad([T[i] for i in b]); w=m[:,1:].float(); w=torch.where(w==0,torch.full_like(w,a.all),w).clamp(min=0)
    lg=model(input_ids=ids).logits[:,:-1]; l=torch.nn.functional.cross_entropy(lg.reshape(-1,lg.shape[-1]),ids[:,1:].reshape(-1),reduction="none").view_as(w)
    loss=(l*w).sum()/w.sum(); loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(),1.0); opt.step(); opt.zero_grad(); n+=int((m>=0).sum())
    if (step+1)%a.every==0 or step==total-1:
        tr=(l*(m[:,1:]==1)).sum()/(m[:,1:]==1).sum()
        q,an,bo,f=evaluate(); cpu=time.process_time()-c0; print(f"step {step+1}/{total} loss {tr:.3f} query {q:.2f} answer {an:.2f} both {bo:.2f} wall {time.time()-t0:.0f} cpu {cpu:.0f} tok {n/1e3:.0f}k",flush=True)
        if cpu>a.seconds or bo>0.97: break

0 and torch.save(model.state_dict(),f"last_{a.name}.pt")
