"""The flight record: what each rank did last, kept always, written on faults, explained."""
