"""The start of a job from other weights (`checkpoint.start_from`): a checkpoint of another job, or a model's files.

    FOLDER[@step|@best]          ──checkpoint_source──┐
    model.safetensors, a folder  ──tensor_source──────┼──> Source: tables, dense state, counts of steps
    a DCP folder                 ──dcp, tensor_source─┘        │
    the new job: schema, dense state, settings ──tables, dense, job_state──> Takings: what is taken, new, dropped
                                                               │
    checkpoint 0 of the new job  <──first_checkpoint: rows streamed into full row files, a dense file for each rank

The new job then resumes its own checkpoint 0: rows go to the store from its files, and a job that is killed later
resumes what it has made itself. Nothing is changed before everything is compared.

    takings   records of what is taken, as text and JSON      source             interfaces of what is taken from
    tables    tables and rows                                 dense              the dense part
    job_state schedules, K-FAC, random states, …              checkpoint_source  another job's checkpoint
    tensor_source   tensors by a model's names                safetensor_files, dcp_files   where they are
    open_source   the kind of what a text names               first_checkpoint   the new job's checkpoint 0
    job_settings  what a job's settings say about its state   job_plan           what of it is taken
"""
