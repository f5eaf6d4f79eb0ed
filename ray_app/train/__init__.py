"""The training loop of one worker: step, state, process group, checkpoints. Starting workers is the task of
`cluster`.
"""
