"""Which runs of the model leave out what the rules let a test leave out, and what has no run, and why.

Names of clauses are those of ``runs.DROPPED``; a mutation of the simulation has the name of its clause.
"""

# Methods of ``firn_node.replication.rules.Rules``, and the clauses that stand for them.
CLAUSES_OF: dict[str, tuple[str, ...]] = {
    "after_unknown": ("union",),
    "renewed": ("onelease",),
    "shows_life": ("onelease",),
    "may_act": ("incarnation",),
    "settles_old_process": ("olddoubt",),
    "is_refused": ("refuse",),
    "is_overtaken": ("overtaken",),
    "is_stored": ("durableepoch",),
    "counted": ("growunion", "shrinkwait"),
    "counts": ("ackepoch",),
    "end_of": ("durable",),
    "own_end": ("durable",),
    "in_sync_size": ("minopen", "minack"),
    "holds_committed": ("growcom",),
    "holds_epoch_start": ("growstart",),
    "holds_acknowledged": ("growacked",),
    "is_in_sync": ("insync", "logid"),
    "is_silent": ("silence",),
    "holds_all": ("clean",),
    "answers": ("answerasked",),
    "starts_unclean": ("clean",),
    "has_lease": ("acklease",),
    "has_lease_to_read": ("leaseread",),
    "has_read_barrier": ("barrier",),
    "stops_to_resign": ("resignstop",),
    "may_welcome": ("forcedurable",),
    "cut_point": ("trunc_any", "trunc_history", "trunc_com", "behind"),
    "proves_durable": ("synccut",),
    "takes_committed": ("comhandshake",),
}

# ... and those without a run.
NO_CLAUSE: dict[str, str] = {
    "is_deposing": "who is not deposed by what it hears is deposed by the record: Learn is as late as it likes",
    "awaited": "it counts more replicas than must be: commits come later, which a later Commit is",
    "committed": "only puts together end_of, own_end, counts and counted",
    "reported": "only puts together end_of and counts",
    "acknowledged": "only puts together counts and counted, as the model's AckWritten does",
    "may_join": "only puts together counts and the three holds_...; is_rebuilt belongs to the rebuild",
    "is_lagging": "when a master shrinks is open in the model: Change puts out whom it likes",
    "may_stand": "only puts together is_in_sync and is_silent; its other conditions are courtesy and pace",
    "goes_first": "courtesy among candidates: any of them may be elected in the model",
    "may_read": "only puts together has_lease_to_read and has_read_barrier",
}

# Clauses of the model that are no method of the rules: where they are.
ELSEWHERE: dict[str, str] = {
    "readwait": "engine.reader.Reader.settle: what its partition has of the barrier (docs/replication-drivers.md)",
    "minpos": "state.OpenWrite.min_in_sync: fixed when the write is appended",
    "loaded": "core.write_refusal: Mastery.is_loaded",
    "fence": "core.observe_epoch, election.on_fence",
    "judge": "standby._judge_lost_records",
    "blank": "rebuild.folder.carry_out, install",
    "streamfirst": "rebuild.standby.Rebuilding: the list is asked for once the log has begun",
    "ownlog": "rebuild.standby.Rebuilding.holds_dispatch, whole: what upkeep waits for",
    "ends": "rebuild.source.Source.rows: ``end``; index.restore_end",
    "joins": "rebuild.source.Source.give: no dirty offset lies before the start that it is asked for",
    "pin": "rebuild.source.Source: bytes and masks are those of a held view",
    "startover": "rebuild.pulling.Puller.pull: a folder without a MANIFEST goes",
    "whole": "rebuild.pulling.Puller: the MANIFEST goes last",
    "upto": "rebuild.standby.Rebuilding: ``reach``, by Progress.needs",
}

# Mutations of the simulation without a clause of the same name in the model.
NO_RUN: dict[str, str] = {}

# Events of ``firn_node.replication.events``, and the steps of the model that stand for them.
STEPS_OF: dict[str, tuple[str, ...]] = {
    "Tick": ("Age", "Renew", "Elect", "Change", "StepDown"),
    "Received": ("Handshake", "Replicate", "LearnCom", "Commit", "Fence", "Say"),
    "RecordRead": ("Learn", "Act", "Settle", "Elect"),
    "SwapAnswered": ("Take", "ElectLost"),
    "MetaStored": ("Start", "CatchUp"),
    "LogCut": ("Follow",),
    "Written": ("AppendRec", "AckWritten"),
    "Durable": ("Fsync", "SyncEnd"),
    "TopicsChanged": ("InForce",),
    "SwitchoverAsked": ("Resign",),
    "DataLossAccepted": ("Force",),
    "Rebuilt": ("Join",),
    "Released": ("Upkeep",),
}

# ... and those without one.
NO_STEP: dict[str, str] = {
    "Arriving": "pace: the model gives a stream all the time that it takes",
    "Dispatched": "what is committed is dispatched at once: a read that waits for it comes later, as Read may",
    "StateLoaded": "the log is read with the commit of the epoch start; dropped: loaded",
    "LogDamaged": "a disk that forgets is not in the model; who says so leaves, as by LeaveAsked",
    "LeaveAsked": "Change puts out whom it likes, and who has left takes no further step until it crashes: a node of the "
    "model need not take any",
    "RemovalAsked": "Change puts out whom it likes; the members are not in the model",
}
