"""What runs in the child processes: each module here is one, and writes one JSON report."""
