"""Admission: who may start now, who waits, who is refused, and what a key may use.

Prompt ── Intake ──> Demand       what it asks of a replica, in tokens (``demand``)
             │       Charge       what its key pays for it (``limits``)
             └────> Ask           a Demand, for whom (``admission``)
                     │  waits in the FairQueue (``queue``), has its turn in Turns (``turns``)
                     ▼
                    Grant         a replica, and the Reservation of its Need in that replica's
                     │            budget (``replicas.budget``): leaving it gives all back
                     ▼
                    Ticket        Ask, Grant and Charge of one admitted request (``intake``)
"""
