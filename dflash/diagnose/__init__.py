"""Why a run fails: the doctor, its probes, cold launches, and the isolation notebooks.

    kernel    the attention kernel alone                         notebooks/01_standalone_kernel
    forward   the drafter alone                                  notebooks/02_drafter_forward
    carrying  what a warmup carries over, and what it does not    notebooks/03_warmup
    launch    several drafter threads at once                    notebooks/04_threaded_launch

Each function measures and returns plain values; the notebooks show them and assert the claims.
"""
