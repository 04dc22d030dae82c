"""`diptych plan`: search placements by simulation, explain the choice, write it as a cluster file.

request     the question, validated                 search      the best of many trials, pruned
deploy      a layout as a cluster to simulate       trial       one candidate under one load
layouts     instances, and layouts made of them     placement   DistServe's algorithms and colocated
estimate    closed forms, without simulation        verdict     whether to disaggregate
race        the first verdict, on few layouts       report      the plan as text, JSON and YAML
why         what binds it, and what would help      dollars     what serving costs
running     what a running cluster should change
instance    TTFT, TPOT and throughput of one instance
"""
