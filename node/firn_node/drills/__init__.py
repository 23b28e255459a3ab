"""Drills: a cluster of real processes of its own, load, faults, and a checker that decides (``firn drill``).

========= =====================================================================================
history   what the load asked for and was answered, what readers saw
check     whether a history and the log at its end fit together
linear    whether the operations on one key can have happened one after another
load      producers, consumers and clients of single keys, every operation written down
crowd     thousands of connections, some of them hostile
links     the network between replicas: proxies that delay, hold back and cut
faults    what a broker process does when ``$FIRN_FAULTS`` names a file: bad disk, clock, coordinator
processes the replicas as processes: started, killed, paused, their folders damaged
stage     what a drill works with, and the steps that drills share
catalogue the drills
verdict   one drill from start to result, and the table
audit     what the folders of stopped replicas hold, one beside another
========= =====================================================================================
"""
