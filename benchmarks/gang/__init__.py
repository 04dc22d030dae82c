"""The cost of several ranks per worker: delivery of plans, resharding of KV, steps and pipeline bubbles.

delivery   round trip of a plan to a rank             leader, rank: its two processes; transports: gang's and the limit
reshard    descriptors, bytes and planning time       pure arithmetic, no process
steps      what ranks add to a step, all-reduces      worker_process, driver: a worker in a process of its own
bubble     idle share of a pipeline                   rank_process: the gang's other ranks; plan_times: measured plans
"""
