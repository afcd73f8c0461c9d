"""The terms of a subproblem, added to the gradients of whatever optimizer steps.

An algorithm meets training at each optimizer step: ``slope + pull (w - centre)`` is added to the
parameters' gradients (``fl_strategies.core.subproblem``). One hook that PyTorch calls before the
step of any optimizer does it, for the parameters that are attached, while a :class:`Terms` is
active. Then the steps are those on the loss with <slope, w> + (pull/2) ||w - centre||^2 written
into it:

- A gradient gets the terms once: it is known by its tensor and that tensor's version. Optimizers
  may step each other (Lookahead, SAM) and change gradients before (clipping): while one steps, only
  a closure makes a gradient new. A parameter without a gradient has gradient 0.
- A closure is wrapped, so that each evaluation has the terms' gradient and value, up to a constant:
  their least value is 0, or without a pull their value at the start.
- Gradients that are scaled while an optimizer steps (``GradScaler`` with a fused optimizer) get
  scaled terms. What was unscaled and clipped before gets the terms as they are.
- An optimizer's own pre-hooks act after this one.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fl_strategies.core.subproblem import Subproblem

Views: TypeAlias = Callable[[Tensor], list[Tensor]]
"""Returns a vector [d] as pieces, one for each parameter, in its shape."""


class Held(NamedTuple):
    """A parameter of an optimizer that is attached, its place in the vector, and its group."""

    place: int
    parameter: nn.Parameter
    group: dict[str, Any]


class Ahead(NamedTuple):
    """Steps are taken at e = x + extrapolation (x - x_previous), and end in [-box, box]^d.

    The module holds e between steps. ``box`` 0 is no bound.
    """

    previous: Tensor
    extrapolation: float = 0.0
    box: float = 0.0

    def of(self, x: Tensor) -> Tensor:
        """Return the first e."""
        return x + self.extrapolation * (x - self.previous)


class Terms:
    """The terms of one subproblem, which the steps of attached parameters get, and their count.

    Parameters
    ----------
    subproblem : Subproblem
    start : Tensor [d]
        Where the solve begins.
    views : callable
        Returns a vector's pieces.
    asked_by : str
        The beginning of an error's text, "fedadmm asks its clients".
    rates : bool
        Whether the weights of the steps' gradients are summed, which needs ``torch.optim.SGD``.
    most : float
        The most optimizer steps.
    ahead : Ahead, optional
    """

    def __init__(
        self,
        subproblem: Subproblem,
        start: Tensor,
        views: Views,
        *,
        asked_by: str = "the algorithm asks a client",
        rates: bool = False,
        most: float = math.inf,
        ahead: Ahead | None = None,
    ) -> None:
        slope, pull, centre = subproblem
        self.needed = subproblem.bends or rates or ahead is not None
        self.pull = float(pull)
        sloped = isinstance(slope, Tensor) or slope != 0.0
        self._asked_by = asked_by
        self._slope = views(_vector(slope, start)) if sloped else None
        self._centre = views(_vector(centre, start)) if self.pull else None
        self._start = views(start)
        self._begun = views(ahead.of(start)) if ahead else self._start
        self._rates, self._most, self._ahead = rates, most, ahead
        self._x = [*self._start]
        self._before = views(ahead.previous) if ahead else []
        self._parameters: list[nn.Parameter | None] = []
        self._marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._strangers: dict[int, weakref.ref[Tensor]] = {}
        self._call: dict[str, Any] | None = None  # keyword arguments of the outermost step
        self._given = set[int]()  # places whose gradients have the terms in this step
        self._counted: list[tuple[list[Held], Any]] = []
        self._momenta: weakref.WeakKeyDictionary[Optimizer, dict[int, Any]]
        self._momenta = weakref.WeakKeyDictionary()
        self._weights: dict[int, Any] = {}
        self._first: dict[int, float] = {}
        self._stepped = set[int]()
        self._left: dict[int, tuple[int, Tensor]] = {}
        self._skipped: Any = 0
        self._steps = self._others = self._withheld = 0
        self.fault: ValueError | None = None

    # ---- who gets the terms -------------------------------------------------------------------

    def attach(self, parameters: Sequence[nn.Parameter | None]) -> None:
        """Give the terms to steps of ``parameters``, one for each piece; None gets none."""
        if same(self._parameters, parameters):
            return
        if self._steps:
            self._fail(
                f"another module was attached after {self._steps} optimizer steps of the first one"
            )
        seen = (self._strangers.get(id(p)) for p in parameters)
        if any(ref is not None and ref() is p for ref, p in zip(seen, parameters, strict=True)):
            self._fail(
                "an optimizer stepped the module before it was attached: call attach(model) after"
                " load_state_dict"
            )
        self._detach()
        self._parameters = [*parameters]
        for place, parameter in enumerate(parameters):
            if parameter is not None:
                _ATTACHED[id(parameter)] = self, place

    def _detach(self) -> None:
        for parameter in self._parameters:
            if parameter is not None and _ATTACHED.get(id(parameter), (None,))[0] is self:
                del _ATTACHED[id(parameter)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, steps of attached parameters get the terms; nothing of it remains."""
        token = _CURRENT.set(self)
        try:
            with _hooked():
                yield
        finally:
            _CURRENT.reset(token)
            self._detach()

    # ---- a step -------------------------------------------------------------------------------

    def before_step(
        self, optimizer: Optimizer, held: list[Held], args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Add the terms to the gradients that a step uses; return its new arguments, if any."""
        nested = self._is_stepping
        if not nested:
            self._call, self._given, self._counted = kwargs, set(), []
        step = Step(self, optimizer, held, nested)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            step.add()
            return None
        kept = step.add_apart()

        def with_terms() -> Any:
            step.restore(kept)
            self._given.difference_update(h.place for h in held)
            with torch.enable_grad():
                loss = closure()
            fresh = step.add()
            if loss is None or not fresh or not (self.pull or self._slope):
                return loss
            return loss + self._value(fresh)

        if "closure" not in kwargs:
            return (args[0], with_terms, *args[2:]), kwargs
        with_closure = {**kwargs, "closure": with_terms}
        if not nested:
            self._call = with_closure
        return args, with_closure

    @property
    def _is_stepping(self) -> bool:
        """Whether a step was begun that has neither ended nor raised: its call is on the stack."""
        frame = None if self._call is None else sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == _HOOKING and frame.f_locals.get("kwargs") is self._call:
                return True
            frame = frame.f_back
        return False

    def after_step(self, kwargs: dict[str, Any]) -> None:
        """Move ahead, and note what the step left, unless another optimizer's step called it."""
        if kwargs is not self._call and self._is_stepping:
            return
        counted, self._counted, self._call = self._counted, [], None
        for held, skipped in counted:
            if self._ahead is not None:
                self._move(self._ahead, held, skipped)
            if self._rates or self._ahead:
                self._left |= {place: (p._version, p.detach().clone()) for place, p, _ in held}

    @torch.no_grad()
    def _move(self, ahead: Ahead, held: Sequence[Held], skipped: Any) -> None:
        """Project what a step came to, and move ahead."""
        for place, p, _ in held:
            x, before = self._x[place].to(p), self._before[place].to(p)
            if ahead.box:
                p.clamp_(-ahead.box, ahead.box)
            new = p.detach().clone()
            if skipped is not None:
                new, x = torch.where(skipped, x, new), torch.where(skipped, before, x)
            self._x[place], self._before[place] = new, x
            p.copy_(new + ahead.extrapolation * (new - x))

    def saw(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer that holds no attached parameter."""
        self._others += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._strangers.setdefault(id(p), weakref.ref(p))
        self._check_most()

    def withheld(self, optimizer: Optimizer) -> None:
        """Note that a scaler called no step, for infinite gradients."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._withheld += any(_ATTACHED.get(id(p), (None,))[0] is self for p in parameters)

    # ---- what it came to ----------------------------------------------------------------------

    def check_seen(self) -> None:
        """Raise ``ValueError`` if the terms were needed, and no step of the module got them.

        Also raise what was raised inside the loop, if the loop caught it; and if the rule needs to
        know the steps, and the loop changed what the last one left.
        """
        if self.fault is not None:
            raise self.fault
        if any(map(self._is_changed, self._left)):
            raise ValueError(self._changed("after its last step"))
        if not self.needed or self.steps:
            return
        seen = ["nothing was attached: call attach(model) after load_state_dict"]
        if self._parameters:
            seen = ["no optimizer stepped the attached module's parameters"]
            if skipped := self._steps + self._withheld:
                seen.append(f"all its {skipped} steps were skipped for infinite gradients")
        if self._others:
            seen.append(f"{self._others} steps were of other parameters, such as a copy's")
        raise ValueError(
            f"{self._asked_by} for training with the algorithm's terms, which optimizer steps get,"
            f" and {'; '.join(seen)}"
        )

    def check_ended(self, ended: Sequence[Tensor]) -> None:
        """Raise ``ValueError`` if the rule needs to know the steps, and ``ended`` differs."""
        if any(_differ(ended[place].to(left), left) for place, (_, left) in self._left.items()):
            raise ValueError(self._changed("in its reply"))

    def _is_changed(self, place: int) -> bool:
        """Return whether a parameter is not what its last step left, or what it began with."""
        p, (_, left) = self._parameters[place], self._left.get(place, (None, self._begun[place]))
        return p is not None and _differ(p, left.to(p))

    def _changed(self, when: str) -> str:
        return (
            f"{self._asked_by} for what its optimizer steps come to, and the training loop changed"
            f" the model {when}, as restoring the best weights does: only steps may change it"
        )

    @property
    def unstepped(self) -> list[tuple[int, nn.Parameter]]:
        """The attached parameters that no step was of, and their places, if terms are needed."""
        if not self.needed:
            return []
        places = enumerate(self._parameters)
        return [(i, p) for i, p in places if p is not None and i not in self._stepped]

    def moved_apart(self, ended: Sequence[Tensor]) -> list[int]:
        """Return the places of those of ``unstepped`` whose piece of ``ended`` is another."""
        return [
            place
            for place, p in self.unstepped
            if not torch.equal(
                ended[place].detach().to("cpu", p.dtype), self._begun[place].to("cpu", p.dtype)
            )
        ]

    @property
    def steps(self) -> int:
        """The steps of attached parameters, without those that a scaler skipped."""
        return self._steps - int(self._skipped)

    @property
    def taken(self) -> int:
        """All optimizer steps that count towards the bound."""
        return self._steps + self._others

    @property
    def iterates(self) -> tuple[Tensor, Tensor]:
        """The last two iterates [d] of steps that go ahead."""
        assert self._ahead is not None
        like = self._ahead.previous
        last, before = (
            torch.cat([piece.reshape(-1).to(like) for piece in pieces])
            for pieces in (self._x, self._before)
        )
        return last, before

    def weights(self) -> tuple[float, float | Tensor]:
        """Return a and A of :class:`.Solved`: ``weight`` and ``rates``."""
        places = range(len(self._start))
        a = {place: float(weight) for place, weight in self._weights.items()}
        A = {place: weight * self._first[place] for place, weight in a.items() if weight}
        weight = next(iter(a.values())) if len({*a.values()}) == 1 else math.nan
        if len(A) == len(places) and len({*A.values()}) == 1:
            return weight, A[0]
        pieces = [
            torch.full_like(start, A.get(place, math.inf)).reshape(-1)
            for place, start in enumerate(self._start)
        ]
        return weight, torch.cat(pieces)

    # ---- parts of a step ----------------------------------------------------------------------

    def is_fresh(self, held: Held) -> bool:
        """Return whether the parameter's gradient has not got the terms yet."""
        return held.place not in self._given and not self.is_marked(held)

    def is_marked(self, held: Held) -> bool:
        """Return whether the parameter's gradient is the one of :meth:`mark`, unchanged."""
        mark, gradient = self._marks.get(held.place), held.parameter.grad
        if mark is None or gradient is None:
            return False
        return mark[0]() is gradient and mark[1] == gradient._version

    def mark(self, held: Sequence[Held]) -> None:
        """Remember that the parameters' gradients have the terms."""
        for place, p, _ in held:
            self._given.add(place)
            assert p.grad is not None
            self._marks[place] = weakref.ref(p.grad), p.grad._version

    def add_to(self, gradients: list[Tensor], held: Sequence[Held], scale: Any) -> None:
        """Add the terms' gradient at the parameters to ``gradients``, multiplied by ``scale``.

        A group with ``maximize`` ascends the negative loss: it gets the negative gradient.
        """
        parts: list[tuple[list[Tensor], float]] = []
        if self._centre is not None:
            parts.append((self._offsets(held), self.pull))
        if self._slope is not None:
            parts.append((_at(self._slope, held), 1.0))
        for part, factor in parts:
            if any(group.get("maximize") for _, _, group in held):
                part = [
                    -a if h.group.get("maximize") else a for a, h in zip(part, held, strict=True)
                ]
            added = part if scale is None else [*torch._foreach_mul(part, scale.to(part[0]))]
            torch._foreach_add_(gradients, added, alpha=factor)

    def _offsets(self, held: Sequence[Held]) -> list[Tensor]:
        assert self._centre is not None
        w = [p.detach() for _, p, _ in held]
        offsets: list[Tensor] = [*torch._foreach_sub(w, _at(self._centre, held))]
        return offsets

    def _value(self, held: Sequence[Held]) -> Tensor | float:
        """Return the terms' value at the parameters, less a constant."""
        slopes = [] if self._slope is None else _at(self._slope, held)
        if self._centre is not None:
            return value_of(self.pull, slopes, self._offsets(held))
        w = [p.detach() for _, p, _ in held]
        return value_of(0.0, slopes, [*torch._foreach_sub(w, _at(self._start, held))])

    def count(self, step: Step) -> None:
        """Count a step, and weigh its gradients."""
        if self._rates or self._ahead is not None:
            for place, p, _ in step.held:
                version = self._left[place][0] if place in self._left else None
                if version != p._version and self._is_changed(place):
                    when = "before its first step" if version is None else "between two steps"
                    self._fail(self._changed(when))
        self._steps += 1
        self._stepped.update(held.place for held in step.held)
        found = getattr(step.optimizer, "found_inf", None)
        skipped = None if found is None else found > 0
        if skipped is not None:
            self._skipped = self._skipped + skipped.long()
        self._counted.append((step.held, skipped))
        self._check_most()
        if self._rates:
            for held in step.held:
                self._weigh(step.optimizer, held, skipped)

    def _weigh(self, optimizer: Optimizer, held: Held, skipped: Any) -> None:
        """Sum up what the gradient of a step counts in all steps to come, by (1) of
        ``fl_strategies.solvers.gradient_weights`` for rates that differ from step to step."""
        place, p, group = held
        if type(optimizer) is not SGD or group["dampening"] or group["maximize"]:
            options = [name for name in ("dampening", "maximize") if group.get(name)]
            with_options = f" with {' and '.join(options)}" if options else ""
            self._fail(
                f"{self._asked_by} for what its steps add up to, which is known of torch.optim.SGD"
                f" without dampening: the training loop steps {type(optimizer).__name__}"
                f"{with_options}"
            )
        if p.grad is None:
            return
        lr, momentum = float(group["lr"]), group["momentum"]
        if lr:
            self._first.setdefault(place, lr)
        first, a = self._first.get(place, 1.0), self._weights.get(place, 0.0)
        momenta = self._momenta.setdefault(optimizer, {})
        begun = optimizer.state.get(p, {}).get("momentum_buffer") is not None
        if begun and momentum and place not in momenta:
            self._fail(
                f"{self._asked_by} for what its steps add up to, and the optimizer's momentum is"
                " from before: make the optimizer in each round anew"
            )
        before = momenta.get(place, 0.0) if begun else 0.0
        u = 1.0 - self.pull * first * a
        b = momentum * before + u
        after = a + lr / first * (u + momentum * b if group["nesterov"] else b)
        if skipped is not None:
            precise = torch.float32 if p.device.type == "mps" else torch.float64
            before, b, a, after = (
                torch.as_tensor(number, dtype=precise, device=p.device)
                for number in (before, b, a, after)
            )
            b, after = torch.where(skipped, before, b), torch.where(skipped, a, after)
        momenta[place], self._weights[place] = b, after

    def _check_most(self) -> None:
        if self.taken > self._most:
            self._fail(
                f"the training loop takes more than {self._most:,} optimizer steps, the most that"
                " the client takes for a request (its max_steps)"
            )

    def _fail(self, text: str) -> None:
        self.fault = ValueError(text)
        raise self.fault


class Step:
    """One call of an optimizer's ``step``: gradients get the terms when they are computed."""

    def __init__(self, terms: Terms, optimizer: Optimizer, held: list[Held], nested: bool) -> None:
        self.terms, self.optimizer, self._nested = terms, optimizer, nested
        self.held = [one for one in held if one.parameter.requires_grad]
        self._counted = False

    def add(self) -> list[Held]:
        """Add the terms to gradients that have not got them; return whose these are."""
        terms, bends = self.terms, self.terms.pull or self.terms._slope is not None
        fresh = [
            h for h in self.held if terms.is_fresh(h) and (bends or h.parameter.grad is not None)
        ]
        if fresh and bends:
            with torch.no_grad():
                for _, p, _ in fresh:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    elif p.grad.is_sparse:
                        p.grad = p.grad.to_dense()
                terms.add_to(
                    [p.grad for _, p, _ in fresh if p.grad is not None], fresh, self._scale
                )
        return self._noted(fresh)

    def add_apart(self) -> dict[int, tuple[Tensor, Tensor]]:
        """As :meth:`add` for gradients that are there before a closure computes others.

        Return, by place, those gradients before and after, for :meth:`restore`.
        """
        terms = self.terms
        fresh = [h for h in self.held if h.parameter.grad is not None and terms.is_fresh(h)]
        kept = {}
        with torch.no_grad():
            for one in fresh:
                before = one.parameter.grad
                assert before is not None
                one.parameter.grad = before.to_dense() if before.is_sparse else before.clone()
                kept[one.place] = before, one.parameter.grad
            if fresh and (terms.pull or terms._slope is not None):
                terms.add_to([after for _, after in kept.values()], fresh, self._scale)
        self._noted(fresh)
        return kept

    def restore(self, kept: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Put gradients back that nobody has changed since: a closure may add to them."""
        for held in self.held:
            before, after = kept.pop(held.place, (None, None))
            if after is not None and held.parameter.grad is after and self.terms.is_marked(held):
                held.parameter.grad = before

    def _noted(self, fresh: list[Held]) -> list[Held]:
        with_gradient = [h for h in self.held if h.parameter.grad is not None]
        self.terms.mark(with_gradient)
        if with_gradient and not self._counted and (fresh or not self._nested):
            self._counted = True
            self.terms.count(self)
        return fresh

    @property
    def _scale(self) -> Any:
        return getattr(self.optimizer, "grad_scale", None)


def value_of(pull: float, slopes: list[Tensor], offsets: list[Tensor]) -> Tensor | float:
    """Return the terms' value, less a constant, by the parameters' pieces.

    With a ``pull`` their least value is 0, and ``offsets`` are from the centre; they are written
    over. Else their value at the start is 0, and ``offsets`` are from there.
    """
    if not pull:
        return sum((a * moved).sum() for a, moved in zip(slopes, offsets, strict=True))
    if slopes:
        torch._foreach_add_(offsets, slopes, alpha=1.0 / pull)
    return pull / 2 * sum((offset * offset).sum() for offset in offsets)


def same(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def _vector(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value).to(like).expand_as(like)


def _at(pieces: list[Tensor], held: Sequence[Held]) -> list[Tensor]:
    """Return the parameters' pieces, where the parameters are: each moves there once."""
    for place, p, _ in held:
        if pieces[place].device != p.device or pieces[place].dtype != p.dtype:
            pieces[place] = pieces[place].to(p)
    return [pieces[place] for place, _, _ in held]


class WatchedScalers:
    """Until it is removed, steps that a ``GradScaler`` withholds from an optimizer are noted.

    It skips a step without a call of the optimizer, unless this is a fused one.
    """

    def __init__(self) -> None:
        self._step = step = GradScaler.step

        @functools.wraps(step)
        def watched(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            current = _CURRENT.get()
            before = 0 if current is None else current.taken
            result = step(scaler, optimizer, *args, **kwargs)
            if current is not None and current.taken == before:
                current.withheld(optimizer)
            return result

        setattr(GradScaler, "step", watched)  # noqa: B010 - mypy allows no assignment to a method

    def remove(self) -> None:
        """Let scalers step as they did."""
        setattr(GradScaler, "step", self._step)  # noqa: B010


# ---- the hook -----------------------------------------------------------------------------------

_CURRENT: ContextVar[Terms | None] = ContextVar("terms", default=None)
_ATTACHED: dict[int, tuple[Terms, int]] = {}
"""The terms that a parameter gets, by the parameter's id, and its place; terms hold parameters."""
_HOOKING = Optimizer.profile_hook_step.__code__.co_filename
"""The file of what calls hooks around a step."""
_HANDLES: list[RemovableHandle | WatchedScalers] = []
_LOCK = threading.Lock()
_users = 0


@contextmanager
def _hooked() -> Iterator[None]:
    """Have PyTorch call one hook before and one after each optimizer step of the process."""
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            # a compiled step calls them, and compiles nothing of them
            before, after = map(torch.compiler.disable, (_before_step, _after_step))
            _HANDLES.append(register_optimizer_step_pre_hook(before))
            _HANDLES.append(register_optimizer_step_post_hook(after))
            _HANDLES.append(WatchedScalers())
    try:
        yield
    finally:
        with _LOCK:
            _users -= 1
            while not _users and _HANDLES:
                _HANDLES.pop().remove()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    held: list[Held] = []
    terms = None
    for group in optimizer.param_groups:
        for p in group["params"]:
            if (found := _ATTACHED.get(id(p))) is not None:
                terms, place = found
                held.append(Held(place, p, group))
    if terms is not None:
        return terms.before_step(optimizer, held, args, kwargs)
    if (current := _CURRENT.get()) is not None:
        current.saw(optimizer)
    return None


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if (found := _ATTACHED.get(id(p))) is not None:
                found[0].after_step(kwargs)
                return


def _differ(now: Tensor, left: Tensor) -> bool:
    """Return whether two tensors differ; NaN is NaN, as where training has diverged."""
    return not torch.allclose(now.detach(), left, rtol=0.0, atol=0.0, equal_nan=True)
