"""Measurements on real GPUs: each script one command, for any number of GPUs, evidence as text.

    . bench/gpu/install.sh                    # vLLM and this project, on a bare machine
    python -m bench.gpu.all --out DIR         # what fits on the GPUs that are there
    python -m bench.gpu.nccl --out DIR        # or one of them

Each script boots its own vLLM servers and a gateway, is itself the trainer, and ends with exit
status 0 if every check held. One that needs more GPUs than there are says so and ends with 0.

`--backend gloo` runs the same with real vLLM servers on CPUs, `--dry-run` with simulated ones:
that is how the scripts are tested. What is measured there means nothing.
"""
