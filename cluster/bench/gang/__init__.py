"""What it costs to compute on several ranks: how plans reach them, how KV is re-sharded between them, where steps go.

delivery   ways to bring a plan to a rank          leader, rank   its two processes      ways   one module each
"""
