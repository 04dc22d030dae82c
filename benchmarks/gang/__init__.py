"""The cost of several ranks per worker: resharding of KV, steps and pipeline bubbles.

reshard    descriptors, bytes and planning time       pure arithmetic, no process
steps      what ranks add to a step, all-reduces      worker_process, driver: a worker in a process of its own
bubble     idle share of a pipeline                   rank_process: the gang's other ranks; plan_times: measured plans
"""
