"""ET-Agent: flywheel, choice of trajectories, the fictional world with its questions, files of ET-Agent's code."""
