import argparse, json, os, re, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
p = argparse.ArgumentParser(); p.add_argument("--seconds", default="360"); p.add_argument("--jobs", type=int, default=os.cpu_count()); p.add_argument("--out", required=True)
a = p.parse_args()
B = dict(tok="names", vocab=1024, headdim=32, layers=3, tokens=2048, lr=3e-3, all=0.3, num=40000, docs=40000)
MC = json.dumps({"multi_hop": 0.5, "comparison": 0.5})
C = {
 "lr4": {"lr": 4e-3}, "lr4comp": {"lr": 4e-3, "kinds": MC}, "head64all1lr4": {"headdim": 64, "all": 1.0, "lr": 4e-3}, "lr4layers4": {"lr": 4e-3, "layers": 4},
 "base": {}, "lr6": {"lr": 6e-3}, "lr4all0": {"lr": 4e-3, "all": 0.0}, "lr6tok4096": {"tokens": 4096, "lr": 6e-3},
 "lr3tok1024": {"tokens": 1024}, "lr4vocab512": {"lr": 4e-3, "vocab": 512}, "lr3wide256": {"hidden": 256, "headdim": 64}, "lr4theta1e4": {"lr": 4e-3, "theta": 10000.0},
 "lr4long": {"lr": 4e-3, "long": 1}, "lr4layers4comp": {"layers": 4, "lr": 4e-3, "kinds": MC, "all": 1.0}, "lr4word3": {"lr": 4e-3, "wordings": 3}, "lr4layers4word3": {"lr": 4e-3, "layers": 4, "wordings": 3},
 "lr4word2": {"lr": 4e-3, "wordings": 2}, "narrow128l4": {"hidden": 128, "layers": 4, "lr": 5e-3}, "layers2": {"layers": 2, "lr": 4e-3}, "bpe": {"tok": "bpe", "lr": 4e-3},
 "pairs": {"pairs": 6000, "lr": 4e-3}, "theta100": {"theta": 100.0, "lr": 4e-3}, "lr10": {"lr": 1e-2}, "lr2": {"lr": 2e-3},
}
root = Path(__file__).resolve().parent
def run(name):
    args = [x for k, v in {**B, **C[name]}.items() if k != "wordings" for x in (f"--{k}", str(v))]
    env = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="", WORDINGS=str(C[name].get("wordings", 1)), PYTHONPATH=str(root.parent.parent))
    r = subprocess.run([sys.executable, str(root / "one.py"), "--name", name, "--seconds", a.seconds, "--every", "100", *args], capture_output=True, text=True, env=env, cwd="/tmp")
    lines = [x for x in r.stdout.splitlines() if x.startswith(("step", "len"))]
    print(name, lines[-1:] or r.stderr[-300:], flush=True)
    return {"config": C[name], "lines": lines, "error": r.stderr[-500:] if r.returncode else ""}
with ThreadPoolExecutor(a.jobs) as pool: res = dict(zip(C, pool.map(run, C)))
Path(a.out).write_text(json.dumps(res, indent=1))
