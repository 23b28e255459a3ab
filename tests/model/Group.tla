------------------------------- MODULE Group -------------------------------
(* One broker group by the rules of firn_node.replication: replicas of one  *)
(* log, and one record that changes only by compare-and-set. A name in Drop *)
(* leaves one clause out; TLC then shows what the clause is for.            *)
(*                                                                          *)
(* Faults: power loss (any part of the unsynced tail goes), a process that  *)
(* crashes, a disk lost under the same name, messages late, lost and out of *)
(* order, pauses (a process takes no step), stale knowledge of the record,  *)
(* compare-and-sets with unknown outcome, a volume that moves to another    *)
(* machine while its old process lives on, data loss accepted by a person.  *)
(*                                                                          *)
(* A process is named by its node. When a volume moves, its old process     *)
(* goes on as Twin, with what it remembers and what it has read of the log, *)
(* and without a disk: it can make nothing durable any more.                *)
(*                                                                          *)
(* Requests: with InFlight every compare-and-set stays on its way until it  *)
(* is applied or another version is there. Without it, a request is applied *)
(* when it is sent and its sender hears late or never: of all requests      *)
(* against one version only one is ever applied, what its conditions rest   *)
(* on cannot change until then, and one that is never applied can only hold *)
(* commits back. Versions are abstracted to "knows the newest", so that     *)
(* grows, shrinks and renewals are not bounded, only epochs are.            *)
(*                                                                          *)
(* A log is a sequence of <<epoch, record>>: 0 is an epoch start; with min, *)
(* the tens of a record say what minInSync it was taken under, hundreds are *)
(* what it changes minInSync to.                                            *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
  Node, Twin, None,
  MaxEpoch, MaxRec, MaxCrash, MaxLoss, MaxForce, MaxMove,     \* bounds
  MinInSync,     \* in force before the first change of it
  Interval,      \* TRUE: flush interval, a second, earlier acknowledgement
  InFlight,      \* TRUE: requests to the coordinator stay in flight
  With,          \* parts switched on: read, resign, com, min, store, sync, answers; still: only elections change in_sync
  Drop           \* names of the clauses left out

VARIABLES
  \* the coordinator, and what is on its way
  rec,      \* the record [e, m, i, S]: epoch, process and log id of the master, in_sync
  forced,   \* epochs that were elected by accepted data loss
  aged,     \* this version was seen unchanged for leaseTtl by some observer
  pend,     \* compare-and-sets in flight against the newest version
  said,     \* answers "I am unclean, my log ends here" that a candidate may still be given
  \* a process; all lost in a crash
  asked,    \* epoch that it asked for, 0: none
  won,      \* epoch that it got and does not know of yet, 0: none
  acting,   \* epoch in which it is master, 0: none
  fresh,    \* master: the version that it knows is the newest
  vs,       \* master: in_sync of the version that it knows
  cnt,      \* master: the counted set
  size,     \* master: the least size of in_sync, known or asked for since
  valid,    \* master: its lease, by its own clock
  fol,      \* epoch followed, after its handshake, 0: none
  com,      \* committed position known (a part of it may outlive a crash: the checkpoint)
  whole,    \* where its master's log ended at the handshake (flush interval)
  sync,     \* end of the log when the sync under way began, 0: none (100 more: and the log was cut since)
  \* a folder
  ep,       \* highest epoch seen, durable
  log, dur, \* the log, and how much of it is durable
  gen,      \* its log id, by number
  clean,    \* durable mark: nothing that was received is missing (flush interval)
  doubt,    \* its old process may live on another machine
  \* what masters were told, heard late = committed late
  ackd,     \* durable ends, by log id and epoch
  ackw,     \* written ends (flush interval)
  \* the moved volume
  home,     \* the node whose folder Twin had opened, None: no volume has moved
  over,     \* a newer process of Twin's folder has said Hello in its place
  \* ghosts
  gc,       \* the longest log ever committed by anyone, less what was given up
  gi,       \* the longest log ever acknowledged under flush interval
  seen,     \* highest position acknowledged to or read by a client
  fenced,   \* epoch below which a node has promised to do nothing, by the log that it has
  excused,  \* every in-sync node was unclean at one moment
  bad,      \* two committed logs disagreed, or a given up one was acknowledged
  thin,     \* acknowledged while too few of in_sync held it, or taken under a minInSync that had been changed
  stuck,    \* a standby was asked to cut below its committed position, and nobody had accepted that
  nrec, crashes, losses, forces

coord   == <<rec, forced, aged, pend, said>>
known   == <<asked, won, fresh, vs>>
office  == <<acting, cnt, size, valid>>
task    == <<whole, sync>>
process == <<fol, com, task>>
folder  == <<ep, log, dur, gen, clean, doubt>>
net     == <<ackd, ackw>>
twins   == <<home, over>>
clients == <<gc, gi, seen>>
marks   == <<fenced, excused, bad, thin, stuck>>
budget  == <<nrec, crashes, losses, forces>>

Rule(r) == r \notin Drop
Off     == [x \in {} |-> 0]     \* of a part that is switched off: EXCEPT leaves it as it is
Proc    == IF MaxMove > 0 THEN Node \cup {Twin} ELSE Node
Gens    == 0..(MaxLoss + MaxForce)
Ids     == Node \X Gens
Id(p)   == <<IF p = Twin THEN home ELSE p, gen[p]>>
Lives(p) == p # Twin \/ home # None
NoAck   == [e \in 1..MaxEpoch |-> 0]
NoAnswers == [i \in IF "answers" \in With THEN Ids ELSE {} |-> <<>>]
Max(a, b) == IF a > b THEN a ELSE b
Min(a, b) == IF a < b THEN a ELSE b
MinOf(s)  == CHOOSE x \in s : \A y \in s : x <= y
MaxOf(s)  == CHOOSE x \in s : \A y \in s : x >= y
Cut(l, k) == SubSeq(l, 1, k)
Raise(a, i, e, x) == [a EXCEPT ![i] = [@ EXCEPT ![e] = Max(@, x)]]
Prefix(a, b) == Len(a) <= Len(b) /\ a = Cut(b, Len(a))
Longer(a, b) == IF Len(a) > Len(b) THEN a ELSE b
Shared(a, b) == Cut(a, MaxOf({k \in 0..Min(Len(a), Len(b)) : Cut(a, k) = Cut(b, k)}))

LastOf(l, e)   == Cardinality({i \in 1..Len(l) : l[i][1] <= e})   \* epochs never fall along a log
EpochsOf(l)    == {l[i][1] : i \in 1..Len(l)}
LastEpoch(l)   == IF l = <<>> THEN 0 ELSE l[Len(l)][1]
StartPos(m)    == Cardinality({i \in 1..Len(log[m]) : log[m][i][1] < acting[m]})
Started(m)     == acting[m] # 0 /\ LastEpoch(log[m]) = acting[m]
Forced(e)      == MaxOf({0} \cup {f \in forced : f <= e})
GivenUp(m)     == acting[m] < Forced(MaxEpoch)   \* a mastership that accepted data loss has ended, heard of or not

Counting   == "min" \in With
MinIn(l)   == LET changes == {i \in 1..Len(l) : l[i][2] > 100}
              IN IF changes = {} THEN MinInSync ELSE l[MaxOf(changes)][2] \div 100
InForce(m) == MinIn(Cut(log[m], com[m]))             \* what is committed counts, once it is dispatched
MinOfWrite(m, p) == (log[m][p][2] % 100) \div 10

\* The end of the last epoch that both logs have.
Common(a, b) == LET both == EpochsOf(a) \cap EpochsOf(b)
                IN IF both = {} THEN 0 ELSE Min(LastOf(a, MaxOf(both)), LastOf(b, MaxOf(both)))
CutPoint(n, m) == CASE ~Rule("trunc_any")     -> Min(Len(log[n]), Len(log[m]))
                    [] ~Rule("trunc_history") -> Min(Len(log[n]), StartPos(m))
                    [] ~Rule("trunc_com")     -> Min(com[n], Len(log[m]))
                    [] OTHER -> Common(log[n], log[m])

Init ==
  /\ \E m \in Node, S \in SUBSET Node :
       /\ m \in S
       /\ rec = [e |-> 1, m |-> m, i |-> <<m, 0>>, S |-> {<<n, 0>> : n \in S}]
       /\ acting = [p \in Proc |-> IF p = m THEN 1 ELSE 0]
       /\ fresh = [p \in Proc |-> p = m]
       /\ valid = IF "read" \in With THEN [p \in Proc |-> p = m] ELSE Off
       /\ vs = [p \in Proc |-> IF p = m THEN rec.S ELSE {}]
       /\ cnt = vs
       /\ size = IF Counting THEN [p \in Proc |-> IF p = m THEN Cardinality(S) ELSE 0] ELSE Off
       /\ fol = [p \in Proc |-> IF p \in S \ {m} THEN 1 ELSE 0]
       /\ log = [p \in Proc |-> IF p \in S THEN <<<<1, 0>>>> ELSE <<>>]
       /\ dur = [p \in Proc |-> IF p \in S THEN 1 ELSE 0]
       /\ ep = dur
       /\ com = [p \in Proc |-> IF p = m THEN 1 ELSE 0]
       /\ sync = IF "sync" \in With THEN [p \in Proc |-> 0] ELSE Off
       /\ whole = IF Interval THEN [p \in Proc |-> 0] ELSE Off
       /\ ackd = [i \in Ids |-> IF i[1] \in S /\ i[2] = 0 THEN [NoAck EXCEPT ![1] = 1] ELSE NoAck]
       /\ ackw = IF Interval THEN ackd ELSE Off
  /\ won = [p \in Proc |-> 0]
  /\ asked = IF InFlight THEN won ELSE Off
  /\ fenced = IF MaxForce > 0 THEN won ELSE Off
  /\ forced = {} /\ aged = FALSE /\ pend = {} /\ said = NoAnswers
  /\ gen = [p \in Proc |-> 0]
  /\ clean = IF Interval THEN [n \in Node |-> TRUE] ELSE Off
  /\ doubt = IF MaxMove > 0 THEN [n \in Node |-> FALSE] ELSE Off
  /\ home = None /\ over = FALSE
  /\ gc = <<<<1, 0>>>> /\ gi = <<>> /\ seen = 1
  /\ excused = FALSE /\ bad = FALSE /\ thin = FALSE /\ stuck = FALSE
  /\ nrec = 0 /\ crashes = 0 /\ losses = 0 /\ forces = 0

----------------------------------------------------------------------------
(* Losing office. What is known of an epoch in which nobody acts any more   *)
(* cannot matter: it is forgotten, which saves states.                      *)

Keep == ~Rule("ackepoch")
FolWithout(m)    == [k \in Proc |-> IF acting[m] # 0 /\ fol[k] = acting[m] THEN 0 ELSE fol[k]]
AckWithout(a, m) == IF acting[m] = 0 \/ Keep THEN a ELSE [i \in DOMAIN a |-> [a[i] EXCEPT ![acting[m]] = 0]]
WithoutAcks(m)   == /\ ackd' = AckWithout(ackd, m)
                    /\ ackw' = AckWithout(ackw, m)
Now        == [asked |-> asked, won |-> won, vs |-> vs, fresh |-> fresh]
Without(m) == [asked |-> [asked EXCEPT ![m] = 0], won |-> [won EXCEPT ![m] = 0],
               vs |-> [vs EXCEPT ![m] = {}], fresh |-> [fresh EXCEPT ![m] = FALSE]]
LoseOffice(m) ==
  /\ acting' = [acting EXCEPT ![m] = 0]
  /\ cnt' = [cnt EXCEPT ![m] = {}]
  /\ size' = [size EXCEPT ![m] = 0]
  /\ valid' = [valid EXCEPT ![m] = FALSE]
Remember(b) == asked' = b.asked /\ won' = b.won /\ vs' = b.vs /\ fresh' = b.fresh
StopActing(m) == LoseOffice(m) /\ Remember(Without(m))
ComWithout(m) == IF "com" \in With THEN com ELSE [com EXCEPT ![m] = 0]

----------------------------------------------------------------------------
(* The coordinator *)

AllUncleanIn(S, g, c) == \A i \in S : i[2] # g[i[1]] \/ ~c[i[1]]
Answers == IF Rule("answerasked") THEN NoAnswers ELSE said

Take(p, b, hears) == \* the only way in which the record changes; b: what processes remember
  /\ rec' = [e |-> p.e, m |-> p.m, i |-> p.i, S |-> p.S]
  /\ aged' = FALSE /\ pend' = {} /\ said' = Answers
  /\ asked' = [q \in DOMAIN asked |-> 0]
  /\ won' = IF hears THEN [b.won EXCEPT ![p.m] = p.e] ELSE b.won
  /\ vs' = IF hears THEN [b.vs EXCEPT ![p.m] = p.S] ELSE b.vs
  /\ fresh' = [q \in Proc |-> FALSE]
  /\ excused' = (excused \/ (Interval /\ AllUncleanIn(p.S, gen, clean)))
  /\ IF p.f                                  \* what a person gave up is not looked for any more
     THEN /\ forced' = forced \cup {p.e}
          /\ gc' = Shared(gc, Cut(log[p.m], dur[p.m]))
          /\ gi' = <<>>
          /\ seen' = Min(seen, Len(gc'))
     ELSE UNCHANGED <<forced, gc, gi, seen>>

Ask(p, b, hears) ==  \* hears: this process will act on it
  IF InFlight
  THEN /\ p \notin pend /\ pend' = pend \cup {p}
       /\ Remember([b EXCEPT !.asked = IF hears THEN [@ EXCEPT ![p.m] = p.e] ELSE @])
       /\ UNCHANGED <<rec, forced, aged, said, gc, gi, seen, excused>>
  ELSE Take(p, b, hears)

Apply(p) ==
  /\ Take(p, Now, p.e > rec.e /\ asked[p.m] = p.e)
  /\ UNCHANGED <<office, process, folder, net, twins, fenced, bad, thin, stuck, budget>>

Age ==               \* by now every lease that rests on this version or an older one has ended
  /\ "read" \in With /\ ~aged /\ aged' = TRUE
  /\ valid' = [p \in DOMAIN valid |-> FALSE]
  /\ UNCHANGED <<rec, forced, pend, said, known, acting, cnt, size, process, folder, net, twins, clients, marks, budget>>

Learn(m) ==          \* a master reads the record, as late as it likes
  /\ acting[m] # 0 /\ ~fresh[m]
  /\ IF rec.e = acting[m] /\ rec.m = m
     THEN /\ fresh' = [fresh EXCEPT ![m] = TRUE]
          /\ vs' = [vs EXCEPT ![m] = rec.S]
          /\ cnt' = [cnt EXCEPT ![m] = rec.S]      \* a newer version settles what was asked for
          /\ size' = [size EXCEPT ![m] = Cardinality(rec.S)]
          /\ UNCHANGED <<asked, won, acting, valid, fol, net, com>>
     ELSE /\ StopActing(m)
          /\ fol' = FolWithout(m) /\ WithoutAcks(m) /\ com' = ComWithout(m)
  /\ ep' = [ep EXCEPT ![m] = IF m = Twin THEN @ ELSE Max(@, rec.e)]
  /\ UNCHANGED <<coord, task, log, dur, gen, clean, doubt, twins, clients, marks, budget>>

GiveUp(m) ==         \* a read that still shows the old version is taken for "not applied"
  /\ ~Rule("union") /\ acting[m] # 0 /\ cnt[m] # vs[m]
  /\ cnt' = [cnt EXCEPT ![m] = vs[m]]
  /\ UNCHANGED <<coord, known, acting, size, valid, process, folder, net, twins, clients, marks, budget>>

Renew(m) ==          \* a renewal is the next version of the record: it fails a slower election, and fails after one
  /\ "read" \in With /\ acting[m] # 0 /\ ~valid[m]
  /\ valid' = [valid EXCEPT ![m] = TRUE]
  /\ IF Rule("onelease")
     THEN /\ fresh[m] /\ rec.m = m
          /\ aged' = FALSE /\ pend' = {} /\ said' = Answers
          /\ asked' = [p \in DOMAIN asked |-> 0]
          /\ cnt' = [cnt EXCEPT ![m] = vs[m]]
          /\ size' = [size EXCEPT ![m] = Cardinality(vs[m])]
     ELSE UNCHANGED <<aged, pend, said, asked, cnt, size>>      \* a lease beside the record: a decided election goes on
  /\ UNCHANGED <<rec, forced, won, fresh, vs, acting, process, folder, net, twins, clients, marks, budget>>

----------------------------------------------------------------------------
(* Election *)

Silent(n) ==         \* no lease can be held under this version
  \/ aged \/ rec.m = None \/ rec.m = n \/ ~Rule("silence")
  \/ rec.m = Twin /\ home = n /\ gen[Twin] = gen[n] /\ ~doubt[n]

Say(n) ==            \* an unclean node answers a candidate; the answer may be on its way for long
  /\ "answers" \in With /\ ~clean[n]
  /\ Rule("answerasked") => \E c \in Node \ {n} : acting[c] = 0 /\ ~clean[c] /\ Silent(c)
  /\ said' = [said EXCEPT ![Id(n)] = <<LastEpoch(log[n]), Len(log[n])>>]
  /\ said' # said
  /\ UNCHANGED <<rec, forced, aged, pend, known, office, process, folder, net, twins, clients, marks, budget>>

Here(n)  == <<LastEpoch(log[n]), Len(log[n])>>
NotLonger(a, b) == a[1] < b[1] \/ (a[1] = b[1] /\ a[2] <= b[2])
AllUnclean(n) ==     \* every other in-sync node has answered that it has lost something, n's log is the longest
  \A i \in rec.S \ {Id(n)} :
    IF "answers" \in With
    THEN said[i] # <<>> /\ NotLonger(said[i], Here(n))
    ELSE i[2] = gen[i[1]] /\ ~clean[i[1]] /\ NotLonger(Here(i[1]), Here(n))

Stand(n, i, S, hears, isForced) ==
  /\ acting[n] = 0 /\ won[n] = 0 /\ rec.e < MaxEpoch
  /\ "read" \in With => Silent(n)
  /\ Ask([e |-> rec.e + 1, m |-> n, i |-> i, S |-> S, f |-> isForced], Now, hears)
  /\ UNCHANGED <<office, com, task, folder, net, twins, fenced, bad, thin, stuck, nrec, crashes, losses>>

Elect(n) ==
  /\ IF Rule("logid") THEN Rule("insync") => Id(n) \in rec.S ELSE \E i \in rec.S : i[1] = n
  /\ Interval /\ Rule("clean") => clean[n] \/ AllUnclean(n)
  /\ Stand(n, Id(n), (rec.S \ {rec.i}) \cup {Id(n)}, TRUE, FALSE)
  /\ UNCHANGED <<fol, forces>>

ElectLost(n) ==      \* the process that asked has crashed since, or cannot act: the record names a master that never was
  /\ Lives(n) /\ (crashes + losses > 0 \/ n = Twin)
  /\ \E i \in rec.S : /\ IF n = Twin THEN i = Id(n) ELSE i[1] = n
                      /\ Stand(n, i, (rec.S \ {rec.i}) \cup {i}, FALSE, FALSE)
  /\ UNCHANGED <<fol, forces>>

Force(n) ==          \* a person accepts the loss of whatever n does not have
  /\ forces < MaxForce /\ forces' = forces + 1 /\ log[n] # <<>>
  /\ Stand(n, Id(n), {Id(n)}, TRUE, TRUE)
  /\ fol' = [fol EXCEPT ![n] = 0]

Fence(n) ==          \* n promises to do nothing below the epoch to come, durably, before it answers
  /\ forces < MaxForce /\ rec.e < MaxEpoch /\ fenced[n] <= rec.e
  /\ fenced' = [fenced EXCEPT ![n] = rec.e + 1]
  /\ IF Rule("fence")
     THEN /\ ep' = [ep EXCEPT ![n] = Max(@, rec.e + 1)]
          /\ StopActing(n) /\ fol' = [FolWithout(n) EXCEPT ![n] = 0]
          /\ WithoutAcks(n) /\ com' = ComWithout(n)
     ELSE UNCHANGED <<ep, known, office, fol, net, com>>
  /\ UNCHANGED <<coord, task, log, dur, gen, clean, doubt, twins, clients, excused, bad, thin, stuck, budget>>

TakeOffice(n, e, S) ==
  /\ acting' = [acting EXCEPT ![n] = e]
  /\ won' = [won EXCEPT ![n] = 0]
  /\ fol' = [fol EXCEPT ![n] = 0]
  /\ fresh' = [fresh EXCEPT ![n] = rec.e = e /\ rec.S = S /\ rec.m = n]
  /\ vs' = [vs EXCEPT ![n] = S]
  /\ cnt' = [cnt EXCEPT ![n] = S]
  /\ size' = [size EXCEPT ![n] = Cardinality(S)]
  /\ valid' = [valid EXCEPT ![n] = rec.e = e /\ rec.m = n /\ ~aged]
EpochStart(n, e) ==
  /\ ep' = [ep EXCEPT ![n] = Max(@, e)]
  /\ log' = [log EXCEPT ![n] = IF LastEpoch(@) = e THEN @ ELSE Append(@, <<e, 0>>)]

Begin(n, e, S) ==
  /\ acting[n] = 0 /\ ep[n] <= e
  /\ TakeOffice(n, e, S)
  /\ IF "store" \in With THEN UNCHANGED <<ep, log>> ELSE EpochStart(n, e)
  /\ clean' = [clean EXCEPT ![n] = TRUE]
  /\ UNCHANGED <<coord, asked, com, task, dur, gen, doubt, net, twins, clients, marks, budget>>

Act(n) ==            \* only in an epoch that this process asked for
  \/ won[n] # 0 /\ Begin(n, won[n], vs[n])
  \/ ~Rule("incarnation") /\ rec.m # None /\ rec.i = Id(n) /\ Begin(n, rec.e, rec.S)

Start(n) ==          \* the epoch is durable: its first record
  /\ "store" \in With /\ acting[n] # 0 /\ ~Started(n)
  /\ EpochStart(n, acting[n])
  /\ UNCHANGED <<coord, known, office, process, dur, gen, clean, doubt, net, twins, clients, marks, budget>>

Resign(m) ==         \* planned switchover: stop first, then ask to be nobody
  /\ "resign" \in With /\ acting[m] # 0 /\ fresh[m] /\ rec.m = m /\ rec.e < MaxEpoch
  /\ LET p == [e |-> rec.e, m |-> None, i |-> None, S |-> rec.S, f |-> FALSE] IN
     IF Rule("resignstop")
     THEN /\ Ask(p, Without(m), FALSE) /\ LoseOffice(m)
          /\ fol' = FolWithout(m) /\ WithoutAcks(m) /\ com' = ComWithout(m)
     ELSE Ask(p, Now, FALSE) /\ UNCHANGED <<office, fol, net, com>>
  /\ UNCHANGED <<task, folder, twins, fenced, bad, thin, stuck, budget>>

StepDown(m) ==       \* it has stopped, the record names it still, and it may stand again
  /\ "resign" \in With /\ acting[m] # 0 /\ rec.m = m /\ rec.e < MaxEpoch
  /\ StopActing(m) /\ fol' = FolWithout(m) /\ WithoutAcks(m) /\ com' = ComWithout(m)
  /\ UNCHANGED <<coord, task, folder, twins, clients, marks, budget>>

----------------------------------------------------------------------------
(* The master *)

AppendRec(m) ==      \* a record, or a change of minInSync
  /\ Started(m) /\ nrec < MaxRec /\ nrec' = nrec + 1
  /\ Counting => valid[m] /\ size[m] >= InForce(m) /\ (com[m] >= StartPos(m) \/ ~Rule("loaded"))
  /\ \E v \in IF Counting THEN {0, 1, 2} ELSE {0} :
       log' = [log EXCEPT ![m] = Append(@, <<acting[m], nrec' + 100 * v + IF Counting THEN 10 * InForce(m) ELSE 0>>)]
  /\ thin' = (thin \/ (Counting /\ InForce(m) # MinIn(gc)))
  /\ UNCHANGED <<coord, known, office, process, ep, dur, gen, clean, doubt, net, twins, clients, fenced, excused, bad, stuck, crashes, losses, forces>>

Heard(m, i) == IF Rule("ackepoch") THEN ackd[i][acting[m]] ELSE MaxOf({ackd[i][e] : e \in 1..MaxEpoch})
End(m, i)   == IF i # Id(m) THEN Heard(m, i) ELSE IF Rule("durable") THEN dur[m] ELSE Len(log[m])

Commit(m) ==
  /\ Started(m)
  /\ LET c == Min(Len(log[m]), MinOf({End(m, i) : i \in cnt[m] \cup {Id(m)}}))
         P == Cut(log[m], c) IN
     /\ c > com[m]
     /\ com' = [com EXCEPT ![m] = c]
     /\ IF GivenUp(m) THEN UNCHANGED <<bad, gc>>
        ELSE /\ bad' = (bad \/ ~(Prefix(P, gc) \/ Prefix(gc, P)))
             /\ gc' = Longer(gc, P)
  /\ UNCHANGED <<coord, known, office, fol, task, folder, net, twins, gi, seen, fenced, excused, thin, stuck, budget>>

Holds(i, m, p) == i[2] = gen[i[1]] /\ dur[i[1]] >= p /\ Cut(log[i[1]], p) = Cut(log[m], p)
Need(m, p) == IF Rule("minpos") THEN MinOfWrite(m, p) ELSE InForce(m)

Ack(m) ==            \* a write of this epoch is answered: committed, and enough of in_sync, by what was in force when it was taken
  /\ Counting /\ Started(m)
  /\ valid[m] \/ ~Rule("acklease")
  /\ \E p \in 1..com[m] :
       /\ log[m][p][1] = acting[m] /\ log[m][p][2] # 0
       /\ Need(m, p) <= size[m] \/ ~Rule("minack")
       /\ LET few == Cardinality({i \in rec.S : Holds(i, m, p)}) < MinOfWrite(m, p) IN
          /\ p > seen \/ few \/ GivenUp(m)
          /\ thin' = (thin \/ few)
       /\ seen' = Max(seen, p)
  /\ bad' = (bad \/ GivenUp(m))
  /\ UNCHANGED <<coord, known, office, process, folder, net, twins, gc, gi, fenced, excused, stuck, budget>>

Written(m, i) == IF i = Id(m) THEN Len(log[m]) ELSE ackw[i][acting[m]]

AckWritten(m) ==     \* flush interval: acknowledged when written in the whole counted set
  /\ Interval /\ Started(m)
  /\ LET w == MinOf({Written(m, i) : i \in cnt[m] \cup {Id(m)}}) IN
     /\ w <= Len(log[m]) /\ w > ackw[Id(m)][acting[m]]
     /\ ackw' = Raise(ackw, Id(m), acting[m], w)     \* its own entry: what it has acknowledged
     /\ gi' = IF w > Len(gi) /\ ~GivenUp(m) /\ ("read" \in With => valid[m]) THEN Cut(log[m], w) ELSE gi
  /\ UNCHANGED <<coord, known, office, process, folder, ackd, twins, gc, seen, marks, budget>>

MayJoin(m, i) ==
  /\ Heard(m, i) >= com[m] \/ ~Rule("growcom")
  /\ Heard(m, i) >= StartPos(m) \/ ~Rule("growstart")
  /\ Interval /\ Rule("growacked") => ackw[i][acting[m]] >= ackw[Id(m)][acting[m]]
  /\ Heard(m, i) > 0 \/ ~(Rule("growcom") /\ Rule("growstart"))

Change(m) ==         \* the master takes some in and puts some out
  /\ "still" \notin With /\ acting[m] # 0 /\ fresh[m] /\ rec.m = m /\ rec.e = acting[m]
  /\ LET near == {Id(p) : p \in {q \in Proc : Lives(q)}} \ (rec.S \cup {Id(m)}) IN
     \E J \in SUBSET {i \in near : Started(m) /\ MayJoin(m, i)}, L \in SUBSET (rec.S \ {Id(m)}) :
       LET S == (rec.S \ L) \cup J IN
       /\ S # rec.S
       /\ IF L # {} /\ ~Rule("shrinkwait")
          THEN /\ J = {} /\ cnt' = [cnt EXCEPT ![m] = @ \ L] /\ cnt' # cnt
               /\ UNCHANGED <<coord, known, clients, excused>>
          ELSE /\ Ask([e |-> rec.e, m |-> m, i |-> rec.i, S |-> S, f |-> FALSE], Now, FALSE)
               /\ cnt' = [cnt EXCEPT ![m] = IF Rule("growunion") THEN @ \cup J ELSE @]
       /\ size' = [size EXCEPT ![m] = IF Rule("minopen") THEN Min(@, Cardinality(S)) ELSE @]
  /\ UNCHANGED <<acting, valid, process, folder, net, twins, fenced, bad, thin, stuck, budget>>

----------------------------------------------------------------------------
(* The follower *)

Blank(n) ==          \* put the log aside, start anew under another log id
  /\ log' = [log EXCEPT ![n] = <<>>] /\ dur' = [dur EXCEPT ![n] = 0] /\ ep' = [ep EXCEPT ![n] = 0]
  /\ gen' = [gen EXCEPT ![n] = @ + 1]
  /\ doubt' = [doubt EXCEPT ![n] = FALSE]

Forget(n) ==
  /\ StopActing(n)
  /\ fol' = [FolWithout(n) EXCEPT ![n] = 0]
  /\ whole' = [whole EXCEPT ![n] = 0] /\ sync' = [sync EXCEPT ![n] = 0]
  /\ WithoutAcks(n)

Follow(n, m, k) ==
  LET e == acting[m]
      kicked == {q \in Proc : q # n /\ Lives(q) /\ Id(q) = Id(n) /\ fol[q] = e} IN
  /\ log' = [log EXCEPT ![n] = Cut(@, k)]
  /\ dur' = [dur EXCEPT ![n] = Min(@, k)]
  /\ ackd' = Raise(AckWithout(ackd, n), Id(n), e, IF Rule("durable") THEN Min(dur[n], k) ELSE k)
  /\ ackw' = [AckWithout(ackw, n) EXCEPT ![Id(n)] = [@ EXCEPT ![e] = k]]
  /\ fol' = [q \in Proc |-> IF q = n THEN e ELSE IF q \in kicked THEN 0 ELSE FolWithout(n)[q]]
  /\ over' = (over \/ Twin \in kicked)
  /\ ep' = [ep EXCEPT ![n] = Max(@, e)]
  /\ whole' = [whole EXCEPT ![n] = Len(log[m])]
  /\ sync' = [sync EXCEPT ![n] = IF k = Len(log[n]) \/ @ = 0 THEN @ ELSE IF Rule("synccut") THEN 0 ELSE @ + 100]
  /\ com' = IF acting[n] # 0 THEN ComWithout(n) ELSE com
  /\ IF acting[n] # 0 THEN StopActing(n) ELSE UNCHANGED <<known, office>>
  /\ UNCHANGED <<coord, gen, clean, doubt, home, clients, marks, budget>>

Rebuild(n) ==        \* its committed records were given up
  /\ Blank(n) /\ Forget(n) /\ com' = [com EXCEPT ![n] = 0]
  /\ clean' = [clean EXCEPT ![n] = FALSE]
  /\ excused' = (excused \/ (Interval /\ AllUncleanIn(rec.S, gen', clean')))
  /\ UNCHANGED <<coord, twins, clients, fenced, bad, thin, stuck, budget>>

Halt == stuck' = TRUE /\ UNCHANGED <<coord, known, office, process, folder, net, twins, clients, fenced, excused, bad, thin, budget>>

Handshake(n, m) ==   \* durable cut, then follow; a lower epoch is refused
  /\ Lives(n) /\ Lives(m) /\ Id(n) # Id(m) /\ Started(m)
  /\ acting[m] > acting[n] /\ fol[n] # acting[m]
  /\ Rule("refuse") => acting[m] >= ep[n]
  /\ n = Twin => acting[m] <= ep[n] /\ ~(over /\ Rule("overtaken"))
  /\ Rule("forcedurable") /\ acting[m] \in forced => dur[m] >= StartPos(m)
  /\ LET k == CutPoint(n, m) IN
     IF k >= com[n] \/ "com" \notin With \/ ~Rule("judge") THEN Follow(n, m, k)
     ELSE IF n # Twin /\ Forced(acting[m]) > LastEpoch(log[n]) THEN Rebuild(n)
     ELSE n # Twin /\ Halt

Follows(n, m) == Lives(n) /\ Lives(m) /\ Id(n) # Id(m) /\ acting[m] # 0 /\ fol[n] = acting[m] /\ acting[n] = 0

Replicate(n, m) ==   \* the master may send what it has not synced itself
  /\ Follows(n, m) /\ Len(log[n]) < Len(log[m])
  /\ LET l == Append(log[n], log[m][Len(log[n]) + 1]) IN
     /\ log' = [log EXCEPT ![n] = l]
     /\ ackd' = IF Rule("durable") THEN ackd ELSE Raise(ackd, Id(n), fol[n], Len(l))
     /\ ackw' = Raise(ackw, Id(n), fol[n], Len(l))
  /\ UNCHANGED <<coord, known, office, process, ep, dur, gen, clean, doubt, twins, clients, marks, budget>>

SyncBegin(n) ==      \* a sync takes time; what it made durable is reported when it ends
  /\ "sync" \in With /\ sync[n] = 0 /\ dur[n] < Len(log[n])
  /\ sync' = [sync EXCEPT ![n] = Len(log[n])]
  /\ UNCHANGED <<coord, known, office, fol, com, whole, folder, net, twins, clients, marks, budget>>

SyncEnd(n) ==
  /\ "sync" \in With /\ sync[n] # 0 /\ sync' = [sync EXCEPT ![n] = 0]
  /\ LET x == Min(sync[n] % 100, Len(log[n])) IN
     /\ dur' = IF sync[n] > 100 THEN dur ELSE [dur EXCEPT ![n] = Max(@, x)]
     /\ ackd' = IF fol[n] # 0 THEN Raise(ackd, Id(n), fol[n], x) ELSE ackd
  /\ UNCHANGED <<coord, known, office, fol, com, whole, ep, log, gen, clean, doubt, ackw, twins, clients, marks, budget>>

Fsync(n) ==
  /\ "sync" \notin With /\ dur[n] < Len(log[n])
  /\ dur' = [dur EXCEPT ![n] = Len(log[n])]
  /\ ackd' = IF fol[n] # 0 THEN Raise(ackd, Id(n), fol[n], Len(log[n])) ELSE ackd
  /\ UNCHANGED <<coord, known, office, process, ep, log, gen, clean, doubt, ackw, twins, clients, marks, budget>>

LearnCom(n, m) ==    \* only after the handshake of that epoch
  /\ "com" \in With /\ Lives(n) /\ Lives(m) /\ Id(n) # Id(m) /\ Started(m) /\ acting[n] = 0
  /\ IF Rule("comhandshake") THEN fol[n] = acting[m] ELSE acting[m] >= ep[n]
  /\ LET c == Min(com[m], Len(log[n])) IN c > com[n] /\ com' = [com EXCEPT ![n] = c]
  /\ UNCHANGED <<coord, known, office, fol, task, folder, net, twins, clients, marks, budget>>

CatchUp(n) ==        \* has, durably, all that its master had at the handshake
  /\ Interval /\ ~clean[n] /\ fol[n] # 0 /\ dur[n] >= whole[n]
  /\ clean' = [clean EXCEPT ![n] = TRUE]
  /\ UNCHANGED <<coord, known, office, process, ep, log, dur, gen, doubt, net, twins, clients, marks, budget>>

Settle(n) ==         \* it has seen a record that names no old process of its folder: only then is its boot id stored
  /\ MaxMove > 0 /\ doubt[n] /\ rec.m # Twin
  /\ doubt' = [doubt EXCEPT ![n] = FALSE]
  /\ UNCHANGED <<coord, known, office, process, ep, log, dur, gen, clean, net, twins, clients, marks, budget>>

----------------------------------------------------------------------------
(* Faults *)

Checkpoint(n) == com' \in {[com EXCEPT ![n] = c] : c \in {0} \cup (IF "com" \in With THEN {Min(com[n], dur[n])} ELSE {})}
Restarted(n)  == doubt' = IF Rule("olddoubt") THEN doubt ELSE [doubt EXCEPT ![n] = FALSE]

PowerLoss(n) ==      \* what recovery keeps of the unsynced tail it syncs
  /\ crashes < MaxCrash /\ crashes' = crashes + 1
  /\ Forget(n) /\ Checkpoint(n) /\ Restarted(n)
  /\ \E k \in dur[n]..Len(log[n]) :
       /\ log' = [log EXCEPT ![n] = Cut(@, k)]
       /\ dur' = [dur EXCEPT ![n] = k]
       /\ ep' = [ep EXCEPT ![n] = IF Rule("durableepoch") THEN @ ELSE LastEpoch(Cut(log[n], k))]
  /\ clean' = [clean EXCEPT ![n] = FALSE]   \* a new boot proves nothing
  /\ gen' = gen
  /\ excused' = (excused \/ (Interval /\ AllUncleanIn(rec.S, gen, clean')))
  /\ UNCHANGED <<coord, twins, clients, fenced, bad, thin, stuck, nrec, losses, forces>>

ProcessCrash(n) ==   \* the page cache survives; in flush sync a PowerLoss that loses nothing
  /\ Interval \/ (MaxMove > 0 /\ doubt[n])
  /\ crashes < MaxCrash /\ crashes' = crashes + 1
  /\ Forget(n) /\ Checkpoint(n) /\ Restarted(n)
  /\ UNCHANGED <<coord, ep, log, dur, gen, clean, twins, clients, marks, nrec, losses, forces>>

DiskLoss(n) ==
  /\ losses < MaxLoss /\ losses' = losses + 1
  /\ Blank(n) /\ Forget(n) /\ com' = [com EXCEPT ![n] = 0]
  /\ clean' = [clean EXCEPT ![n] = FALSE]
  /\ excused' = (excused \/ (Interval /\ AllUncleanIn(rec.S, gen', clean')))
  /\ fenced' = [fenced EXCEPT ![n] = 0]     \* the promise was the log's, and so is the place in in_sync
  /\ UNCHANGED <<coord, twins, clients, bad, thin, stuck, nrec, crashes, forces>>

Hand(f, n, rest) == [f EXCEPT ![Twin] = f[n], ![n] = rest]
Copy(f, n) == [f EXCEPT ![Twin] = f[n]]

Move(n) ==           \* the volume is taken to another machine and opened there; its old process lives on as Twin
  /\ MaxMove > 0 /\ home = None /\ home' = n /\ over' = FALSE /\ pend = {}
  /\ rec' = [rec EXCEPT !.m = IF @ = n THEN Twin ELSE @]
  /\ acting' = Hand(acting, n, 0) /\ cnt' = Hand(cnt, n, {}) /\ size' = Hand(size, n, 0) /\ valid' = Hand(valid, n, FALSE)
  /\ fresh' = Hand(fresh, n, FALSE) /\ vs' = Hand(vs, n, {}) /\ asked' = [asked EXCEPT ![n] = 0] /\ won' = [won EXCEPT ![n] = 0]
  /\ fol' = Hand(fol, n, 0) /\ com' = Hand(com, n, 0) /\ whole' = Hand(whole, n, 0)
  /\ sync' = [sync EXCEPT ![n] = 0]
  /\ ep' = Copy(ep, n) /\ gen' = Copy(gen, n)
  /\ \E k \in dur[n]..Len(log[n]) :
       /\ log' = [Copy(log, n) EXCEPT ![n] = Cut(@, k)]
       /\ dur' = [Copy(dur, n) EXCEPT ![n] = k]
  /\ clean' = [clean EXCEPT ![n] = FALSE]
  /\ excused' = (excused \/ (Interval /\ AllUncleanIn(rec.S, gen, clean')))
  /\ doubt' = [doubt EXCEPT ![n] = TRUE]
  /\ UNCHANGED <<forced, aged, pend, said, net, clients, fenced, bad, thin, stuck, budget>>

----------------------------------------------------------------------------
CanRead(m) ==
  /\ acting[m] # 0
  /\ "read" \in With
  /\ valid[m] \/ ~Rule("leaseread")
  /\ Rule("barrier") => com[m] > StartPos(m) /\ Started(m)
  /\ Interval /\ Rule("readwait") => com[m] >= ackw[Id(m)][acting[m]]

Read(m) ==
  /\ CanRead(m) /\ com[m] > seen
  /\ seen' = com[m]
  /\ UNCHANGED <<coord, known, office, process, folder, net, twins, gc, gi, marks, budget>>

Next ==
  \/ Age
  \/ \E p \in pend : Apply(p)
  \/ \E m \in Proc :
       \/ Learn(m) \/ GiveUp(m) \/ Renew(m) \/ Resign(m) \/ StepDown(m) \/ ElectLost(m)
       \/ AppendRec(m) \/ Commit(m) \/ Ack(m) \/ AckWritten(m) \/ Change(m) \/ Read(m)
  \/ \E n \in Node :
       \/ Elect(n) \/ Force(n) \/ Fence(n) \/ Act(n) \/ Start(n) \/ Say(n)
       \/ Fsync(n) \/ SyncBegin(n) \/ SyncEnd(n) \/ CatchUp(n) \/ Settle(n)
       \/ PowerLoss(n) \/ ProcessCrash(n) \/ DiskLoss(n) \/ Move(n)
  \/ \E n, m \in Proc : Handshake(n, m) \/ Replicate(n, m) \/ LearnCom(n, m)

Symmetry == Permutations(Node)

----------------------------------------------------------------------------
(* What must hold: the names are those of the simulation *)

Agreement == ~bad                                             \* committed logs agree: nothing lost, nothing reordered
OneMaster == \A a, b \in Proc : a # b /\ acting[a] # 0 => acting[a] # acting[b]
LogMatching ==                                                \* an epoch's bytes are written once
  \A a, b \in Proc : \A i \in 1..Min(Len(log[a]), Len(log[b])) :
     log[a][i][1] = log[b][i][1] => Cut(log[a], i) = Cut(log[b], i)
MasterComplete ==                                             \* the acting master of the record has all that was ever committed
  \A m \in Proc : acting[m] # 0 /\ acting[m] = rec.e /\ rec.m = m => Prefix(gc, log[m])
InSyncComplete ==                                             \* the core: everyone in in_sync has it durable
  \A n \in Node : Id(n) \in rec.S => Prefix(gc, Cut(log[n], dur[n]))
CommittedPrefix ==                                            \* what a node believes committed is committed
  /\ ~stuck
  /\ \A p \in Proc : LET P == Cut(log[p], com[p]) IN
       /\ com[p] <= Len(log[p])
       /\ \/ Prefix(P, gc)
          \/ forced # {} /\ (LastEpoch(log[p]) < Forced(MaxEpoch) \/ Prefix(gc, P))
ReadFresh ==                                                  \* no read goes back, every acknowledged record is read
  \A m \in Proc : CanRead(m) => /\ com[m] >= seen /\ ~GivenUp(m)
                                /\ Interval => com[m] >= Len(gi) \/ excused
IntervalComplete ==                                           \* flush interval: kept unless every in-sync node was unclean at once
  ~excused => \A m \in Proc : acting[m] # 0 /\ acting[m] = rec.e /\ rec.m = m => Prefix(gi, log[m])
EnoughInSync == ~thin                                         \* as many of in_sync hold what is acknowledged as minInSync said
FencedStay == \A n \in Node : MaxForce > 0 /\ acting[n] # 0 => acting[n] >= fenced[n]     \* who was fenced does nothing in a lower epoch
FencedFollow == \A n \in Node : MaxForce > 0 /\ fol[n] # 0 => fol[n] >= fenced[n]

(* Reachability: each of these must be violated, or the model is too tame *)
NeverCutsADurableTail == ~(\E n, m \in Node : n # m /\ Started(m) /\ acting[m] > acting[n] /\ acting[m] >= ep[n] /\ CutPoint(n, m) < dur[n])
NeverRejoins == ~(rec.e >= 2 /\ Cardinality(rec.S) = 3 /\ Len(gc) >= 3)
NeverTwoMastersAtOnce == ~(\E a, b \in Node : a # b /\ acting[a] # 0 /\ com[b] > StartPos(b) /\ acting[b] > acting[a])
NeverRebuilds == ~(\E n \in Node : gen[n] > losses /\ Id(n) \in rec.S)
NeverTwinActs == ~(home # None /\ acting[Twin] # 0 /\ rec.m = home /\ acting[home] = rec.e)
NeverAcksAfterLowering == ~(seen > 1 /\ \E m \in Node : Started(m) /\ seen <= Len(log[m]) /\ log[m][seen][2] # 0 /\ MinOfWrite(m, seen) < MinInSync /\ size[m] = 1)
=============================================================================
