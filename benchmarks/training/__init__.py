"""What ``python -m benchmarks reference`` trains and measures; each implementation in processes of its own."""
