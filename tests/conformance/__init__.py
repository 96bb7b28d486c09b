"""One suite of replica behaviour for two subjects: the simulator and a real vLLM server.

What holds for both is what the gateway may rely on, and what the simulator may claim. The subject
is chosen by the environment variable CONFORMANCE_SUBJECT: ``sim`` (default) or ``vllm``, the
latter in the environment of tests/e2e.
"""
