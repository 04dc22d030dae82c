"""Other simulators of LLM serving beside Diptych's, on the same load and costs.

speed      requests per CPU second      distserve_case    goodput of DistServe's case in both simulators
sources    where the peers are          *_run             scripts for the peers' Python
process    a peer in a process
"""
