"""The Python tool: runs model-written code in isolated, limited processes.

`tool` is what agents call and `pool` holds warm workers in the training process; `isolation`, `installed` and
`seccomp` decide how a worker is started. `worker`, `child`, `snippet` and `landlock` run inside the sandbox and import
the standard library and each other only.
"""
