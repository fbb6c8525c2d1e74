"""The case of `shardproof check`: pytest runs it on the training that the command was asked for."""
