import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors of the tests are tiny: on a busy machine, waiting for a second thread takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
