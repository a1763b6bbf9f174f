"""What else a URL can name: a server with TLS, a plain web server, a profile's credentials, memory, a directory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.obj.conftest import StartTier, s3_options, set_credentials, tiers_of
from tests.tiering.obj.server import ACCESS_KEY, SECRET_KEY, S3Server

from kvtier.errors import TierError
from kvtier.testing.tier_suite import TierDriver, content_of, make_config, make_rows
from kvtier.tiering.obj import ObjTier


def assert_round_trip(writer: TierDriver, reader: TierDriver) -> None:
    """Store through one tier and find and load through another."""
    writer.tier.check_reachable()
    assert writer.store([1, 2, 3]).success
    assert reader.lookup(2)
    assert not reader.lookup(4)
    assert reader.load([3, 1]).success
    assert np.array_equal(reader.rows[0], content_of(3))


def make_certificates(directory: Path) -> None:
    """Make an authority and a server's certificate that it has signed; a self-signed one would be refused."""
    leaf = "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
    (directory / "leaf.ext").write_text(leaf)
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {curve} -keyout ca.key -out ca.pem -days 2 -subj /CN=kvtier-test-authority",
        f"req {curve} -keyout leaf.key -out leaf.csr -subj /CN=127.0.0.1",
        "x509 -req -in leaf.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out leaf.pem -days 2 -extfile leaf.ext",
    ):
        subprocess.run(["openssl", *command.split()], cwd=directory, check=True, capture_output=True)  # noqa: S607


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that speaks TLS only."""
    directory = tmp_path_factory.mktemp("tls")
    make_certificates(directory)
    options = f"-s3.cert.file={directory}/leaf.pem -s3.key.file={directory}/leaf.key"
    server = S3Server(directory / "weed", options, "https", directory / "ca.pem")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def start_tls_tier(tls_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartTier]:
    """Build tiers on the server with TLS."""
    set_credentials(monkeypatch)
    with tiers_of(s3_options(tls_server, prefix) | {"allow_http": False}) as start:
        yield start


def test_tls_with_an_authority_of_our_own(start_tls_tier: StartTier, tls_server: S3Server) -> None:
    ca_file = str(tls_server.ca_file)
    assert_round_trip(start_tls_tier(ca_file=ca_file), start_tls_tier(ca_file=ca_file))


def test_a_certificate_that_nobody_vouches_for_is_refused(start_tls_tier: StartTier) -> None:
    with pytest.raises(TierError, match="its certificate is not trusted; ca_file"):
        start_tls_tier().tier.check_reachable()


def test_a_web_server_that_takes_put(server: S3Server, prefix: str) -> None:
    with tiers_of({"url": server.web_url, "prefix": prefix, "allow_http": True, "num_threads": 2}) as start:
        writer = start()
        assert_round_trip(writer, start())
        assert writer.store([1, 2]).success
        assert writer.tier.stats()["existed"] == 2


def test_a_profile_gives_the_credentials(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3", reason="profiles are read by boto3: pip install boto3")
    profile = f"[cache]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(profile)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "cache")
    with tiers_of(s3_options(server, prefix)) as start:
        assert_round_trip(start(), start())


def test_two_tiers_share_a_directory(tmp_path: Path) -> None:
    with tiers_of({"url": f"file://{tmp_path}/store", "num_threads": 2, "capacity_bytes": "1MiB"}) as start:
        writer = start()
        assert_round_trip(writer, start())
        for number in range(200):
            writer.poll_until(lambda number=number: writer.store([number]).success)  # type: ignore[misc]  # a default
    sizes = [path.stat().st_size for path in (tmp_path / "store").rglob("*.kv")]
    assert 2**19 < sum(sizes) <= 2**20


def test_memory_is_a_tiers_own() -> None:
    with tiers_of({"url": "memory://"}) as start:
        start().store([1])
        assert not start().lookup(1)


@pytest.mark.parametrize("url", ["gs://bucket", "az://container"])
def test_the_other_services_are_built_without_being_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    tier = ObjTier(make_config(), make_rows(), url=url)
    assert tier.shutdown(1.0)


def test_a_service_for_which_the_environment_says_too_little_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(TierError, match="no client for az://container: check AZURE_STORAGE_ACCOUNT_NAME"):
        ObjTier(make_config(), make_rows(), url="az://container")


def test_without_the_client_library_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "from kvtier.errors import MissingExtraError\n"
        "try:\n    import kvtier.tiering.obj\n"
        "except MissingExtraError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert "pip install '.[obj]'" in said
