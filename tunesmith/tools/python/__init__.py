"""The Python tool: runs model-written code in isolated, limited processes.

`tool` is what agents call; `pool` holds warm workers in the training process, and `call` runs code in a process of one;
`isolation` and `seccomp` decide how a worker is started. `worker`, `child` and `folder` run inside the sandbox and
import the standard library and each other only.
"""
