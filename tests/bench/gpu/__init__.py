"""What the plugin gains and costs on a GPU: ``python -m tests.bench.gpu`` prints one table."""
