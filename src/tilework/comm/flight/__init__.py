"""The flight record: each rank's last operations, always kept, written on faults, explained."""
