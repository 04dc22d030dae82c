"""`diptych plan`: search placements by simulation, explain the choice, write it as a cluster file.

request     the question, validated                 search      the best of many trials, pruned
deploy      a layout as a cluster to simulate       trial       one candidate under one load
placement   DistServe's algorithms and colocated    verdict     whether to disaggregate
estimate    closed forms, without simulation        report      the plan as text, JSON and YAML
race        the first verdict, on few layouts       dollars     what serving costs
why         what binds it, and what would help      option      a layout simulated whole
running     what a running cluster should change
instance    TTFT, TPOT and throughput of one instance
"""
