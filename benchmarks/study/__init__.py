"""The batching policies compared, as docs/batching.md: `make study`.

steps      which steps are measured          virtual    the production engine on a virtual clock
fit        a cost model fitted to them       real       the same with a real executor and the wall clock
workload   who asks what, and when           cells      the grid: policies, lengths, loads
answers    what came of it, in figures       page, pictures, record    what is written
"""
