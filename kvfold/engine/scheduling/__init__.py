"""Continuous batching: the scheduler's loop, its queues, admission, chunked prefill, decoding, preemption, restarts.

scheduler.py         the loop: resume, admit, prefill for a time slice, one decode step; restarts
queues.py            waiting, prefilling, decoding and preempted requests; time shared by tenant
admission.py         who may start; kv_bounds.py says how much KV cache a request may come to need
prefill_manager.py   chunked prefill in time slices
decode_manager.py    one decode step for all, preemption when pages run out
task.py, jobs.py     a request with its sequence; what is submitted and what is told
"""
