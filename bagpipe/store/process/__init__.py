"""A store whose client runs in a process of its own, outside the interpreter lock of the training process.

store       `ProcessStore`: what the training process calls         parent   `Child`: starts the process, waits for it
child       the process: serves two threads of the training process
messages    requests and replies, one packet each                   region   ids, rows and flags in shared memory
"""
