"""What ``python -m benchmarks reference`` and ``plan`` train and measure; each training in processes of its own."""
