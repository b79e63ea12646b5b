CASES = ()
ABSENT = dict.fromkeys(("sub_agents","parallel_calls","structured","streaming","retries","compaction"), "todo")
