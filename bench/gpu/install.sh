# Make a machine ready for the scripts beside this file. Source it: . bench/gpu/install.sh
#
# With a folder of archives (BENCH_ARCHIVES, default .whl in this checkout) nothing is fetched:
# every *.tar.xz there is unpacked into BENCH_SITE, vllm-*.json are vLLM's own notes on models
# (20 s less at the first boot) and triton.tgz holds kernels that an earlier run compiled. torch,
# transformers and triton must be there already. Without such a folder pip installs vLLM and this
# project into a virtual environment.
#
# vLLM 0.33 needs NCCL 2.29.7, several ranks on one GPU 2.30. BENCH_NCCL names the library that
# the scripts preload; where it is unset, torch's own is used.

_archives=${BENCH_ARCHIVES:-.whl}
_site=${BENCH_SITE:-/tmp/site}
_began=$(date +%s)

if ls "$_archives"/*.tar.xz >/dev/null 2>&1; then
    if [ ! -f "$_site/.installed" ]; then
        mkdir -p "$_site" "$HOME/.cache/vllm/modelinfos" "$HOME/.triton"
        _unpacking=
        for _archive in "$_archives"/*.tar.xz; do
            tar -xJf "$_archive" -C "$_site" & _unpacking="$_unpacking $!"
        done
        _broken=0
        for _pid in $_unpacking; do wait "$_pid" || _broken=1; done
        cp "$_archives"/vllm-*.json "$HOME/.cache/vllm/modelinfos/" 2>/dev/null
        [ -f "$_archives/triton.tgz" ] && tar -xzf "$_archives/triton.tgz" -C "$HOME/.triton"
        python3 -m compileall -q -j 0 "$_site" >/dev/null 2>&1
        [ "$_broken" = 0 ] && touch "$_site/.installed"
    fi
    export PYTHONPATH="$_site${PYTHONPATH:+:$PYTHONPATH}"
    [ -f "$_site/nccl/libnccl.so.2" ] && export BENCH_NCCL="$_site/nccl/libnccl.so.2"
elif ! python3 -c 'import vllm, gateway.cli' 2>/dev/null; then
    python3 -m venv .venv-gpu && . .venv-gpu/bin/activate
    python3 -m pip install --quiet vllm==0.33.0 -e .
    python3 -m pip install --quiet --no-deps --target .venv-gpu/nccl nvidia-nccl-cu13==2.32.3
    export BENCH_NCCL="$PWD/.venv-gpu/nccl/nvidia/nccl/lib/libnccl.so.2"
fi
[ -d /usr/local/nvidia/lib64 ] && export LD_LIBRARY_PATH="/usr/local/nvidia/lib64:/usr/local/nvidia/lib"

# Never NVLink multicast: on a host that is shared it can put GPUs out of service for others.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1
echo "installed in $(($(date +%s) - _began)) s: NCCL ${BENCH_NCCL:-of torch}"
