"""Processes that are killed, machines that lose power, disks that are full, gone or hang."""
