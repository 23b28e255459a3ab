------------------------------ MODULE Rebuild ------------------------------
(* One partition of a standby that is rebuilt by messages, by the rules of  *)
(* firn_node.rebuild: its own log from some position on, and one generation *)
(* of the master's compacted log, joined. Meanwhile rows are written, all   *)
(* replicas compact and let go of their logs as they like, and another      *)
(* replica may become master. A name in Drop leaves one clause out.         *)
(*                                                                          *)
(* All rows here are committed: what may be lost is Group's. Every source   *)
(* is in sync and has all of them; it lets go of its log up to its horizon, *)
(* whoever still needs it (the stream's hold on it is pace: who loses his   *)
(* place starts anew). Faults: a connection, a process or a lease ends and  *)
(* the pin is gone; a master is another one at any step; any pause.         *)
(*                                                                          *)
(* A compacted log [horizon, floor, files]: files are the rows that are     *)
(* there, masked ones too. A row is masked when a newer row of its key is   *)
(* there, or when it is a tombstone below the floor; so masks need not be   *)
(* sent. What supersedes a row stays as long as that row does.              *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
  Source,        \* replicas that can be master
  Key,
  MaxRows, MaxAnew, MaxBreak, MaxChange,     \* bounds
  Drop           \* names of the clauses left out

VARIABLES
  rows,     \* all rows ever committed, <<key, is it a put?>>: an offset is a row's number, and its place in the log
  master,   \* whose log is followed
  copy,     \* of each source: its compacted log, and first, the first offset that its log still holds
  \* the standby
  phase,    \* "serves", "follows" (blank, its log has begun), "pulls", "whole" (all has come)
  own,      \* its compacted log: in phase "pulls" what has come; first: where its log begins, or began
  log, end, \* offsets in its log, and the one it takes next; dispatched too when it serves
  next,     \* the offset that it would give next, were it elected
  pin,      \* the generation that the pull reads
  cursor,   \* the row that came last
  upto,     \* where the source's log ended when it gave the pin
  anew, breaks, changes      \* how often

standby == <<phase, own, log, end, next, pin, cursor, upto, anew, breaks>>
vars == <<rows, master, copy, standby, changes>>

Rule(name) == name \notin Drop
Symmetry == Permutations(Source) \cup Permutations(Key)

End == Len(rows) + 1
KeyOf(o) == rows[o][1]
IsPut(o) == rows[o][2]
Newest(S) == IF S = {} THEN 0 ELSE CHOOSE o \in S : \A p \in S : p <= o
Max(a, b) == IF a > b THEN a ELSE b
Fresh(first) == [horizon |-> 1, floor |-> 0, files |-> {}, first |-> first]

---------------------------------------------------------------------------
(* Compacted logs                                                          *)

Superseded(files, o) == \E p \in files : p > o /\ KeyOf(p) = KeyOf(o)
IsBuried(c, o) == ~IsPut(o) /\ o < c.floor
Visible(c) == {o \in c.files : ~Superseded(c.files, o) /\ ~IsBuried(c, o)}

\* What a reader is shown of a compacted log and the log behind it.
Shown(c, tail) == Visible(c) \cup {o \in tail : o >= c.horizon}
\* ... and ends with: the offset of the key's value, 0: none.
Value(S, k) == LET o == Newest({p \in S : KeyOf(p) = k}) IN IF o = 0 THEN 0 ELSE IF IsPut(o) THEN o ELSE 0

\* A row may leave the files: something newer of its key stays, or it is a tombstone that nothing older needs.
MayGo(c, o) == \/ Superseded(c.files, o)
               \/ IsBuried(c, o) /\ \A p \in c.files : p < o => KeyOf(p) # KeyOf(o)

\* What compaction and retention make of a replica in one step: a row is covered, a tombstone's time is over, a row
\* leaves the files, the log lets go of a row.
Kept(c, tail, stop) ==
  (IF c.horizon < stop
     THEN {[c EXCEPT !.horizon = @ + 1, !.files = @ \cup ({c.horizon} \cap tail)]} ELSE {})
  \cup {[c EXCEPT !.floor = o + 1] : o \in {p \in c.files : ~IsPut(p) /\ p >= c.floor}}
  \cup {[c EXCEPT !.files = @ \ {o}] : o \in {p \in c.files : MayGo(c, p)}}
  \cup (IF c.first < c.horizon THEN {[c EXCEPT !.first = @ + 1]} ELSE {})

---------------------------------------------------------------------------
(* The others                                                              *)

Init ==
  /\ rows = <<>> /\ master \in Source /\ copy = [s \in Source |-> Fresh(1)]
  /\ phase = "serves" /\ own = Fresh(1) /\ log = {} /\ end = 1 /\ next = 1
  /\ pin = Fresh(0) /\ cursor = 0 /\ upto = 0 /\ anew = 0 /\ breaks = 0 /\ changes = 0

Write ==
  /\ Len(rows) < MaxRows
  /\ \E k \in Key, put \in BOOLEAN : rows' = Append(rows, <<k, put>>)
  /\ UNCHANGED <<master, copy, standby, changes>>

Upkeep(s) ==
  /\ \E c \in Kept(copy[s], 1..(End - 1), End) : copy' = [copy EXCEPT ![s] = c]
  /\ UNCHANGED <<rows, master, standby, changes>>

Elect(s) ==
  /\ s # master /\ changes < MaxChange
  /\ master' = s /\ changes' = changes + 1
  /\ UNCHANGED <<rows, copy, standby>>

---------------------------------------------------------------------------
(* The standby's log                                                       *)

\* Without streamfirst its log begins when all has been pulled.
HasLog == phase \in {"serves", "whole"} \/ Rule("streamfirst")

\* rules.cut_point: what comes next is in the master's log.
IsServed == HasLog => copy[master].first <= end

Stream ==
  /\ HasLog /\ (Rule("behind") => IsServed)
  /\ LET o == Max(end, copy[master].first) IN
     /\ o < End
     /\ log' = log \cup {o} /\ end' = o + 1 /\ next' = IF phase = "serves" THEN o + 1 ELSE next
  /\ UNCHANGED <<rows, master, copy, phase, own, pin, cursor, upto, anew, breaks, changes>>

\* As any replica, while it serves. A blank one keeps its log whole (Rebuilding.whole).
OwnUpkeep ==
  /\ IF phase = "serves"
       THEN \E c \in Kept(own, log, end) : own' = c
       ELSE ~Rule("ownlog") /\ own.first < end /\ own' = [own EXCEPT !.first = @ + 1]
  /\ log' = {o \in log : o >= own'.first}
  /\ UNCHANGED <<rows, master, copy, phase, end, next, pin, cursor, upto, anew, breaks, changes>>

---------------------------------------------------------------------------
(* The rebuild                                                             *)

\* Its place in the master's log is gone: the folder is emptied, its log begins where the master's does. Without
\* blank, its compacted log stays.
StartAnew ==
  /\ Rule("behind") /\ ~IsServed /\ anew < MaxAnew
  /\ anew' = anew + 1 /\ phase' = "follows"
  /\ own' = [Fresh(copy[master].first) EXCEPT !.files = IF Rule("blank") THEN {} ELSE own.files]
  /\ log' = {} /\ end' = copy[master].first /\ next' = 0
  /\ pin' = Fresh(0) /\ cursor' = 0 /\ upto' = 0
  /\ UNCHANGED <<rows, master, copy, breaks, changes>>

\* Source.give: the pin's dirty offsets lie at or behind the first one of the standby's log.
Pin ==
  /\ phase = "follows" /\ (Rule("joins") => copy[master].horizon >= own.first)
  /\ phase' = "pulls" /\ pin' = [copy[master] EXCEPT !.first = 0] /\ upto' = End
  /\ UNCHANGED <<rows, master, copy, own, log, end, next, cursor, anew, breaks, changes>>

\* A pin is good whoever is master by now. Without pin, each request reads what the master has then.
Left == {o \in (IF Rule("pin") THEN pin.files ELSE copy[master].files) : o > cursor /\ o < pin.horizon}

Pull ==
  /\ phase = "pulls" /\ Left # {}
  /\ LET o == CHOOSE p \in Left : \A q \in Left : p <= q IN
     own' = [own EXCEPT !.files = @ \cup {o}] /\ cursor' = o
  /\ UNCHANGED <<rows, master, copy, phase, log, end, next, pin, upto, anew, breaks, changes>>

\* The MANIFEST is there: from now on the partition outlives restarts and changes of master.
IsWhole ==
  /\ phase' = "whole" /\ pin' = Fresh(0) /\ cursor' = 0
  /\ LET first == IF Rule("streamfirst") THEN own.first ELSE copy[master].first IN
     /\ own' = [own EXCEPT !.horizon = pin.horizon, !.floor = pin.floor, !.first = first]
     /\ end' = IF Rule("streamfirst") THEN end ELSE first

Pulled ==
  /\ phase = "pulls" /\ Left = {} /\ IsWhole
  /\ UNCHANGED <<rows, master, copy, log, next, upto, anew, breaks, changes>>

\* A process, a connection or the pin's lease ends: what has come of the partition goes.
Break ==
  /\ phase = "pulls" /\ breaks < MaxBreak /\ breaks' = breaks + 1
  /\ IF Rule("whole")
       THEN /\ phase' = "follows" /\ pin' = Fresh(0)
            /\ own' = [own EXCEPT !.files = IF Rule("startover") THEN {} ELSE @]
            /\ cursor' = IF Rule("startover") THEN 0 ELSE cursor
            /\ end' = end
       ELSE IsWhole
  /\ UNCHANGED <<rows, master, copy, log, next, upto, anew, changes>>

\* Dispatched from the log's first offset on: from where the list says that the partition had come to by then.
Join ==
  /\ phase = "whole" /\ (Rule("upto") => end >= upto)
  /\ phase' = "serves"
  /\ next' = Max(IF Rule("ends") THEN own.first ELSE 1, 1 + Newest(own.files \cup log))
  /\ upto' = 0
  /\ UNCHANGED <<rows, master, copy, own, log, end, pin, cursor, anew, breaks, changes>>

Next ==
  \/ Write \/ Stream \/ OwnUpkeep \/ StartAnew \/ Pin \/ Pull \/ Pulled \/ Break \/ Join
  \/ \E s \in Source : Upkeep(s) \/ Elect(s)

---------------------------------------------------------------------------
(* Invariants                                                              *)

\* A standby that serves shows the key-value map of all rows that it has dispatched.
SameView ==
  phase = "serves" =>
    \A k \in Key : Value({o \in Shown(own, log) : o < end}, k) = Value(1..(end - 1), k)

\* ... and gives no offset twice, and leaves none out, if it is elected: it then has all that is committed.
NoOffsetTwice == phase = "serves" /\ end = End => next = End

\* What Rebuilding._missing looks for is not there: no offset lies neither in what was pulled nor in the log.
NothingMissing == phase = "whole" => own.horizon..(end - 1) \subseteq log

\* What compaction does in this model is what it must do.
MasterView ==
  \A s \in Source, k \in Key : Value(Shown(copy[s], copy[s].first..(End - 1)), k) = Value(1..(End - 1), k)

\* Not invariants: what must be reached.
NeverDropsUnderAPin ==
  ~(phase = "pulls" /\ \E o \in pin.files : o > cursor /\ ~IsPut(o) /\ o \notin copy[master].files)
NeverServesWhatIsGone ==
  ~(phase = "serves" /\ anew > 0 /\ end = End /\ own.files # {} /\ own.files \cap copy[master].files = {})
NeverWaitsForACompaction ==
  ~(phase = "follows" /\ copy[master].horizon < own.first /\ breaks > 0)
=============================================================================
