#!/usr/bin/env bash
# Runs a command in a virtual machine with two RDMA devices (Soft-RoCE), for tests over real verbs without a NIC.
#
#   bash scripts/roce_vm.sh COMMAND [ARGUMENT...]         bash scripts/roce_vm.sh pytest -m rdma
#
# The guest sees this machine's whole root at the same paths, read-only below an overlay in RAM: what COMMAND writes is
# dropped, except below $ROCE_OUT. UCX there is Debian's, which has verbs; it is never installed on this machine. The
# devices are rxe0 on 10.77.0.1 and rxe1 on 10.77.0.2. Output comes out live; the exit code is COMMAND's (124: time limit,
# 125: the guest did not come up). The active virtual environment is used when ucxkv is in it, else .venv is made.
#
# Needs root on Debian (x86-64) and apt-get; neither KVM nor modules of the host's kernel. Everything emulated: correct,
# and no benchmark. About 75 s from an empty folder, 10 s warm, plus the command.
#
#   ROCE_DIR      work folder, a cache (default ${XDG_CACHE_HOME:-~/.cache}/ucxkv-roce); one machine per folder at a time
#   ROCE_OUT      folder that the command may write to (default ROCE_DIR/out)
#   ROCE_TIMEOUT  seconds for boot and command together (default 900)
#   ROCE_MEM      MiB of memory (default 3072)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

case "${1:-}" in
  -h | --help | "")
    sed -n '2,18p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'
    [ $# -gt 0 ] && exit 0
    exit 2
    ;;
esac

say() { echo "roce: $*" >&2; }
fail() { say "$*"; exit 125; }

[ "$(id -u)" = 0 ] || fail "this needs root (packages, and the guest's view of the host's root)"
[ "$(uname -m)" = x86_64 ] || fail "x86-64 only"
work="${ROCE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/ucxkv-roce}"
mkdir -p "$work/debs/partial" "$work/extra"
work="$(cd "$work" && pwd)"
exec 8> "$work/lock"
flock -n 8 || fail "another machine runs in $work; set ROCE_DIR"
out="${ROCE_OUT:-$work/out}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"

# ---- the environment of the command

# shellcheck source=scripts/env.sh
if ! { [ -n "${VIRTUAL_ENV:-}" ] && "$VIRTUAL_ENV/bin/python" -c 'import ucxkv, pytest' 2> "$work/venv.log"; }; then
  . "$here/env.sh"
  ucxkv_env .venv test
fi

# ---- packages: the emulator here, the rest for the guest only

apt=(apt-get -qq -o DPkg::Lock::Timeout=300)
lists() {
  find /var/lib/apt/lists -name '*Packages*' -mmin -1440 2> /dev/null | grep -q . || "${apt[@]}" update
}
missing=()
command -v qemu-system-x86_64 > /dev/null || missing+=(qemu-system-x86 seabios)
[ -x /bin/busybox ] || missing+=(busybox-static)
if [ ${#missing[@]} -gt 0 ]; then
  lists
  say "installing ${missing[*]}"
  DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "${missing[@]}" > "$work/apt.log" 2>&1 ||
    { tail -20 "$work/apt.log" >&2; fail "apt-get install failed"; }
fi
if [ ! -e "$work/extra/.complete" ]; then
  lists
  say "downloading UCX with verbs"
  # Only what this machine lacks comes; --reinstall would bring the rest too, and is not needed.
  "${apt[@]}" install -y --no-install-recommends --download-only -o "Dir::Cache::archives=$work/debs" \
    libucx0 ibverbs-providers librdmacm1 iproute2 nftables > "$work/apt.log" 2>&1 ||
    { tail -20 "$work/apt.log" >&2; fail "apt-get download failed"; }
  for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$work/extra"; done
  touch "$work/extra/.complete"
fi

# ---- kernel and initrd

# crc32_generic: rxe asks for the algorithm "crc32" when a link is added, and the guest has no modprobe; so for the others.
modules=(virtio_pci virtio_console 9pnet_virtio 9p overlay veth crc32_generic rdma_rxe ib_uverbs rdma_ucm ib_umad
  sch_netem sch_tbf crc32c_generic nf_tables nft_numgen nft_ct)
mark="$(cat "$here/roce/init" "$here/roce/pack.py" | sha256sum | cut -c1-32) ${modules[*]}"
if [ "$(cat "$work/mark" 2> /dev/null)" != "$mark" ]; then
  if ! compgen -G "$work/linux-image-*.deb" > /dev/null; then
    lists
    kernel="$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\)/\1/p' | head -1)"
    [ -n "$kernel" ] || fail "no package linux-image-amd64 here: Debian only"
    say "downloading $kernel"
    (cd "$work" && "${apt[@]}" download "$kernel" > apt.log 2>&1) || { cat "$work/apt.log" >&2; fail "no kernel"; }
  fi
  python3 "$here/roce/pack.py" "$work"/linux-image-*.deb "$work" "$here/roce/init" "${modules[@]}" > "$work/pack.log"
  echo "$mark" > "$work/mark"
fi

# ---- what the guest is told

control="$work/control"
rm -rf "$control"
mkdir "$control"
cp "$here/roce/guest" "$control/guest"
printf 'OUT=%q\nEXTRA=%q\n' "$out" "$work/extra" > "$control/places"
{
  for name in $(compgen -e); do
    case $name in
      PATH | HOME | LANG | LC_* | TERM | CI | VIRTUAL_ENV | PYTHON* | PYTEST* | UCX_* | UCXKV_* | ROCE_*)
        printf 'export %s=%q\n' "$name" "${!name}"
        ;;
    esac
  done
  printf 'export ROCE_OUT=%q UCXKV_ROCE=1\ncd %q || exit 125\nexec' "$out" "$PWD"
  printf ' %q' "$@"
  echo
} > "$control/command"

# ---- boot

# No ERMS and FSRM in the processor: with them the guest copies by `rep movsb`, which is emulated byte by byte.
pipe="$work/pipe"
rm -f "$pipe"
mkfifo "$pipe"
exec 7<> "$pipe"
cat < "$pipe" 7>&- 8>&- &
reader=$!
code=0
timeout -k 5 "${ROCE_TIMEOUT:-900}" qemu-system-x86_64 -M pc -accel tcg,thread=multi \
  -cpu max,-erms,-fsrm,-smap,-smep,-umip -m "${ROCE_MEM:-3072}" -smp 2 \
  -nodefaults -no-user-config -display none -no-reboot -kernel "$work/vmlinux" -initrd "$work/initrd" \
  -append "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0 apparmor=0 random.trust_cpu=on" \
  -serial "file:$work/console" \
  -device virtio-serial-pci -chardev "file,id=o,path=$pipe" -device virtserialport,chardev=o,name=out \
  -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap \
  -device virtio-9p-pci,fsdev=host,mount_tag=host \
  -fsdev "local,id=control,path=$control,security_model=none" -device virtio-9p-pci,fsdev=control,mount_tag=control \
  -fsdev "local,id=out,path=$out,security_model=none" -device virtio-9p-pci,fsdev=out,mount_tag=out \
  < /dev/null > "$work/qemu.log" 2>&1 7>&- 8>&- || code=$?
exec 7>&-
wait "$reader" || true
rm -f "$pipe"
[ -s "$control/code" ] && exit "$(cat "$control/code")"
say "no exit code from the guest (qemu: $code); the end of its console:"
tail -n 15 "$work/console" "$work/qemu.log" >&2 || true
[ "$code" = 124 ] || [ "$code" = 137 ] && exit 124
exit 125
