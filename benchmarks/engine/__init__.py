"""The engine alone, beside its peers and beside what the machine allows: same weights, same threads, in turns.

compare     the part `engine`: prefill and decode of every contender      contenders   who is measured, and how started
step        the part `step`: a decode step taken apart                    driven       one loaded engine in a process
limits      what the machine allows a column (pure)                       drivers      the programs in those processes
chart       the part `engine` as a picture
"""
