"""What it costs to compute on several ranks: how plans reach them, how KV is re-sharded between them, where steps go.

delivery   ways to bring a plan to a rank             leader, rank: its two processes; ways: the limit, the chosen one
reshard    descriptors, bytes and planning time       pure arithmetic, no process
steps      what ranks add to a step, all-reduces      loaded, driver: a worker in a process of its own
bubble     which share of a pipeline's time is idle   members: the gang's other ranks; recorded: clocks around plans
"""
