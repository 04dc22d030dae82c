"""The engine alone, beside its peers and the machine's limits: same weights, same threads, measured in turns.

compare     part `engine`: prefill and decode of every engine   engines             engines and their options
step        part `step`: a decode step taken apart              driver_processes    a loaded engine per process
limits      the machine's limit of a column (pure)              drivers             the programs of those processes
chart       part `engine` as a picture
"""
