"""One model over several processes: tensor and pipeline parallel ranks.

Rank 0 schedules and samples. It sends the plan of each step to the other ranks, which run the same step on their shards
of the weights.
"""
