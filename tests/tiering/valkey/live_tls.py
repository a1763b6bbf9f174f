"""Certificates for a server of a test, made with openssl."""

import subprocess
from pathlib import Path


class Certificates:
    """An authority and a certificate of it for 127.0.0.1.

    Args:
        folder: where the files are made.
    """

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"
        self._make_authority(folder)
        self._make_certificate(folder)

    def server_options(self) -> list[str]:
        """Return what makes redis-server listen with TLS too, one port above the plain one."""
        files = ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.key)]
        return [
            "--tls-port",
            "{tls_port}",
            *files,
            "--tls-ca-cert-file",
            str(self.authority),
            "--tls-auth-clients",
            "no",
        ]

    def _make_authority(self, folder: Path) -> None:
        subject = ["-subj", "/CN=kvtier test authority", "-days", "2"]
        _openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            *subject,
            "-keyout",
            folder / "ca.key",
            "-out",
            self.authority,
        )

    def _make_certificate(self, folder: Path) -> None:
        request = folder / "server.csr"
        extensions = folder / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n", encoding="utf-8")
        _openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=127.0.0.1",
            "-keyout",
            self.key,
            "-out",
            request,
        )
        signer: list[str | Path] = [
            "-CA",
            self.authority,
            "-CAkey",
            folder / "ca.key",
            "-CAcreateserial",
            "-days",
            "2",
        ]
        _openssl("x509", "-req", "-in", request, *signer, "-extfile", extensions, "-out", self.certificate)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)  # noqa: S607
