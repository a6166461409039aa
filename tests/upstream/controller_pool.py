"""A Controller of ours between sockets whose other ends a test holds."""

from array import array
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.managers import io_struct
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tknp.config import TknpConfig
from sglang_tknp.scheduler_ext import forward
from sglang_tknp.scheduler_ext.assigner import Assigner, AssignerSettings
from sglang_tknp.scheduler_ext.controller import Controller
from sglang_tknp.scheduler_ext.messages import encode
from tests import reports

NUM_OWNERS = 3
CAPACITY = 1000


class Pool:
    """A Controller between sockets whose other ends the test holds."""

    def __init__(self, **settings: Any) -> None:
        self.context = zmq.Context()
        self.tokenizer, to_controller = self.pair("tokenizer")
        pairs = [self.pair(f"worker{owner}") for owner in range(NUM_OWNERS)]
        self.owners = [pull for pull, _ in pairs]
        self.reporter = self.context.socket(zmq.PUSH)
        self.replies, to_tokenizer = self.pair("replies")
        self.controller = Controller.__new__(Controller)
        self.controller.__dict__.update(
            stock=self.stock([push for _, push in pairs]),
            workers=[push for _, push in pairs],
            replies=to_tokenizer,
            assigner=Assigner(
                NUM_OWNERS,
                AssignerSettings(**settings),
                self.send,
                lambda *args: self.controller.refuse(*args),
            ),
            config=TknpConfig(),
            settings=AssignerSettings(**settings),
            metrics=None,
            health_turns=iter(list(range(NUM_OWNERS)) * 100),
            early_aborts={},
            log_level=10,
            logs_requests=True,
        )
        self.to_controller = to_controller
        self.gate = SimpleNamespace(check=lambda header: None)
        self.seqs = [0] * NUM_OWNERS
        for owner in range(NUM_OWNERS):
            self.report(owner)

    def send(self, *args: Any) -> None:
        self.controller.send(*args)

    def pair(self, name: str) -> tuple[Any, Any]:
        pull, push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        pull.bind(f"inproc://{name}")
        push.connect(f"inproc://{name}")
        return pull, push

    def stock(self, workers: list[Any]) -> Any:
        """SGLang's own controller, without its processes."""
        stock = DataParallelController.__new__(DataParallelController)
        stock.workers = workers
        stock.status = [True] * NUM_OWNERS
        stock.max_dp_size = NUM_OWNERS
        stock._active_workers = list(range(NUM_OWNERS))
        stock.control_message_step = NUM_OWNERS
        stock.init_dispatcher()
        return stock

    def report(self, owner: int, **state: Any) -> None:
        self.seqs[owner] += 1
        whole = {"capacity": CAPACITY, "max_requests": 100, "context_length": 4096, **state}
        frame = zmq.Frame(encode(reports.report(owner, self.seqs[owner], **whole)))
        self.controller.on_report([frame])

    def ask(self, *messages: Any) -> None:
        """As the tokenizer sends: requests behind their headers, all else in one frame."""
        manager = SimpleNamespace(
            tknp_gate=self.gate, tknp_with_prefix=False, send_to_scheduler=self.to_controller
        )
        for message in messages:
            forward.around_dispatch_to_scheduler(self.stock_dispatch, manager, message)
        while self.tokenizer.poll(100):
            self.controller.on_message(self.tokenizer.recv_multipart(copy=False))

    def stock_dispatch(self, manager: Any, message: Any) -> None:
        io_struct.sock_send(manager.send_to_scheduler, message)

    def received(self, owner: int) -> list[Any]:
        return drain(self.owners[owner])

    def told(self) -> list[Any]:
        """What the tokenizer was told."""
        return drain(self.replies)


def drain(socket: Any) -> list[Any]:
    found = []
    while socket.poll(50):
        found.append(io_struct.sock_recv(socket))
    return found


def request(rid: str, num_tokens: int = 10, max_new_tokens: Any = 10, **fields: Any) -> Any:
    return io_struct.TokenizedGenerateReqInput(
        rid=rid,
        input_text="",
        input_ids=array("q", range(num_tokens)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        **fields,
    )
