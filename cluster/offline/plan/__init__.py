"""Which cluster for which load: placements searched by simulation, answers in words, the chosen one as a cluster file.

asked       what is wanted, checked            search      the best of many candidates, pruned; pure
deploy      a layout as a cluster to simulate  trial       one candidate under one load, whole or a phase of it
placement   DistServe's algorithms, colocated  compared    differences between systems, with intervals
buyer       TTFT, TPOT, throughput apart       whatif      two cluster files against each other
written     a plan as YAML and as words
"""
