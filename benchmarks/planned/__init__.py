"""What ``python -m benchmarks plan`` simulates and measures; each training in a process of its own."""
