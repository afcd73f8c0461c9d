"""Mutants of what others send and what clients keep: each check left out. See mutants.py."""

from trials import of

REPLIES = "tests/test_wire.py tests/test_replies.py tests/test_faults.py"
HOSTS = "tests/test_faults.py tests/test_folding.py tests/test_hosts.py"
NODES = "tests/test_strategy.py tests/test_faults.py"
STATES = "tests/test_ledger.py tests/test_state_files.py tests/test_state.py tests/test_faults.py"
LEGACY = "tests/test_legacy.py tests/test_faults.py"
NAMES = "tests/test_faults.py -k 'name or columns or lost_ones or gone or flower'"

MESSAGES = [
    *of(
        "fl_strategies/messages/wire.py",
        REPLIES,
        {
            "size * dtype.itemsize == len(": "size * dtype.itemsize <= len(",
            "if record.keys() != layout.shapes.keys():": "if layout.shapes.keys() - record.keys():",
            "if array.shape != shape:": "if array.size != math.prod(shape):",
            "if array.dtype != layout.dtypes[name]:": "if False:",
            "if not finite(arrays.values()):": "if False:",
            "> MAX_METRICS:": "> 10**9:",
            "len(name) > MAX_NAME:": "len(name) > 10**9:",
            "if size > most:": "if False:",
            "if entries > MAX_NUMBERS:": "if False:",
            "if len(records) != 1:": "if not records:",
            "(1, MAX_SAMPLES), **expected": "(0, MAX_SAMPLES), **expected",
            "if not all(math.isfinite(": "if values and not any(math.isfinite(",
            "if not low <= value <= high:": "if not low <= value:",
        },
    ),
    *of(
        "fl_strategies/messages/wire.py",
        "tests/test_layouts.py -k 'tie or tied'",
        {"if not np.array_equal(arrays[copy], arrays[first]):": "if False:"},
    ),
    *of(
        "fl_strategies/messages/identity.py",
        "tests/test_replies.py tests/test_layouts.py",
        {
            "elif ran != self.algorithm:": "elif False:",
            "if roles and roles != self.layout.signature:": "if False:",
            "if not self.trust:": "if False:",
        },
    ),
    *of(
        "fl_strategies/messages/tables.py",
        HOSTS,
        {
            "len({*clients} - rows.keys()) < len(": "len({*clients}) < len(",
        },
    ),
    *of(
        "fl_strategies/messages/hosting.py",
        HOSTS,
        {
            "if twice or len({*failures}) < len(failures):": "if False:",
            "        if named:\n": "        if False:\n",
            "if not stack.ndim or len(stack) != len(clients):": "if False:",
            "(BadReply if client in refused else Failed)": "Failed",
            "type(v) is int and v >= 0 for": "type(v) is int for",
            "len(reasons) != len(failures)": "False",
            "({*numbers} - {*folded})": "False",
        },
    ),
    *of(
        "fl_strategies/messages/folding.py",
        HOSTS,
        {
            'if nonce and reply.words.get("state-nonce", nonce) != nonce:': "if False:",
            "upload = self.bound.check(upload)": "pass",
        },
    ),
    *of(
        "fl_strategies/messages/codes.py",
        "tests/test_compression.py",
        {
            "code.dtype != np.uint8 or code.ndim != 1": "code.ndim != 1",
            "name not in arrays or arrays[name].size for": "name not in arrays for",
            "if start and not prefix:": "if start:",
        },
    ),
    *of(
        "fl_strategies/messages/description.py",
        "tests/test_learned_layouts.py",
        {
            "if len({*roles}) < len(roles):": "if False:",
            "distinct and len({*values}) < len(": "len({*values}) < 0 * len(",
        },
    ),
    *of(
        "fl_strategies/server/settling.py",
        "tests/test_learned_layouts.py tests/test_guards.py",
        {
            "if wrong and len(wrong) == len(descriptions):": "if False:",
            "if len(whole) == len(voters):": "if False:",
            "client not in silent or not": "not",
        },
    ),
    *of(
        "fl_strategies/server/reading.py",
        "tests/test_reading.py",
        {
            "asked.policy.unusable(": "{} and asked.policy.unusable(",
            "(coded := reply.words[CODEC]) != policy.coded": "(coded := '')",
            "(size := norm(mean - asked.round.received)) > most": (
                "(size := norm(mean - asked.round.received)) > 2.0 * most"
            ),
        },
    ),
    *of(
        "fl_strategies/server/reading.py",
        REPLIES,
        {"if len(content.array_records) != 1:": "if not content.array_records:"},
    ),
    *of(
        "fl_strategies/server/reading.py",
        "tests/test_compression.py tests/test_folding.py tests/test_state.py",
        {
            "most = policy.bound.bound * (1.0 + ROUNDING)": "most = policy.bound.bound * 1e9",
            "if client not in mine]": "if False]",
            "return reply, self.ledger.check(reply, upload)": "return reply, upload",
        },
    ),
    *of(
        "fl_strategies/server/replies.py",
        REPLIES,
        {
            "elif client in self.first:": "elif False:",
            "if is_reply_to(message, request.about)]": "if message]",
            "in sorted(came.first):": "in came.first:",
            "    except Exception as error:": "    except ValueError as error:",
            "c if c.isprintable() else": "c if True else",
            "line if len(line) <= 500 else": "line if True else",
            "{line[-250:]}": "",
            "word.isascii() and word.isalnum()": "word",
        },
    ),
    *of(
        "fl_strategies/server/replies.py",
        "tests/test_strategy.py tests/test_fedbcd_settings.py",
        {
            "        del good[client]\n": "",
            "np.average(each, weights=weights)": "np.average(each, weights=None)",
        },
    ),
    *of(
        "fl_strategies/server/replies.py",
        NAMES,
        {
            "(r for r in asked.requests if r.about and": "(r for r in () if r.about and",
            "difference(came.first, asked.late)": "difference(asked.late)",
        },
    ),
    *of(
        "fl_strategies/server/replies.py",
        HOSTS,
        {
            "if client not in request.clients:": "if False:",
        },
    ),
    *of(
        "fl_strategies/server/replies.py",
        NAMES,
        {"for name, value in numbers.items()} | kept": "for name, value in numbers.items()}"},
    ),
    *of(
        "fl_strategies/core/metric_names.py",
        NAMES,
        {
            "name in SERVER or name in reports or": "name in reports or",
            "(TESTED, BUSY, *EVALUATED, FOREIGN)": "(BUSY, *EVALUATED, FOREIGN)",
            "EVALUATED, FOREIGN)": "EVALUATED,)",
            "if taken or name.endswith(SPREAD) else": "if taken else",
            "if taken or called.endswith(SPREAD):": "if taken:",
            'else f"eval-{name}"': "else name",
            "taken = called in SERVER or": "taken =",
        },
    ),
    *of(
        "fl_strategies/server/callbacks.py",
        NAMES,
        {
            '[_without("round", info.metrics)]': "[info.metrics]",
            '_without("client", _without("round", row))': '_without("round", row)',
        },
    ),
    *of(
        "fl_strategies/server/nodes.py",
        NODES,
        {
            "            del asked[node]\n": "",
            "if node not in asked or not is_reply_to(reply, asked[node]):": (
                "if node not in asked:"
            ),
            "0 < partitions <= client": "False",
            "not _natural(client) or": "",
            "not isinstance(value, bool) and": "",
            "0 <= value < 2**64": "0 <= value",
            "_natural(count) and count <= MAX_SAMPLES for": "_natural(count) for",
            "partitions if _natural(partitions) else 0": "partitions",
        },
    ),
    *of(
        "fl_strategies/server/nodes.py",
        HOSTS,
        {
            "if client < self.population or client in": "if client in",
            " or client in self._node_of:": ":",
            "not self.population or not _natural(population) or population != self.population:": (
                "not self.population:"
            ),
            "or len({*ids}) < len(ids):": ":",
            "if not self._take(c, node)]": "if c is None]",
        },
    ),
    *of(
        "fl_strategies/compat/translation.py",
        LEGACY,
        {
            "cid.isascii() and cid.isdecimal()": "cid.isdigit()",
            '{**numbers, **further, "num-examples"': '{**further, **numbers, "num-examples"',
            "if result.status.code != Code.OK:": "if False:",
            "    except Exception as error:": "    except ValueError as error:",
        },
    ),
    *of(
        "fl_strategies/compat/legacy.py",
        LEGACY,
        {
            "            if node in proxies\n": "",
            "            else:\n                return\n": "",
        },
    ),
    *of(
        "fl_strategies/core/ledger.py",
        STATES,
        {
            "self.acked.get(client, -1)": "self.acked.get(client, 0)",
            "nonce and recorded and nonce != recorded": "nonce and nonce != recorded",
            "newcomer=client not in self.acked": "newcomer=False",
            'if self.lost_state == "refuse":': "if False:",
            " if u.nonce}": "}",
            'dict(record["nonces"])': "{}",
        },
    ),
    *of(
        "fl_strategies/core/files.py",
        STATES,
        {
            "        if new:\n": "        if False:\n",
            'if metadata["sha256"] != _digest(arrays):': "if False:",
            "os.unlink(temporary)": "pass",
        },
    ),
    *of(
        "fl_strategies/core/files.py",
        "tests/test_run_folders.py tests/test_checkpoints.py",
        {
            "raise OSError(error.errno, error.strerror, str(path)) from None": "raise",
            'split(b"\\n")[:-1]': 'split(b"\\n")',
            "            self._lock = lock": "            pass",
            "except Exception as error:  # whatever a header": "except ValueError as error:  #",
        },
    ),
    *of(
        "clients/node/state.py",
        STATES,
        {
            "acked_round = rounds[-1]": "acked_round = rounds[0]",
            "if client != self.client_id:": "if False:",
            "_check_owner(owner, written, str(path))": "pass",
            "if path == self._path(number))": ")",
            "if asked.run != written.run:": "if False:",
            "except Exception as error:  # whatever a text": "except KeyError as error:  #",
        },
    ),
    *of(
        "clients/node/state.py",
        "tests/test_buffered.py",
        {"and version not in kept_rounds and": "and"},
    ),
    *of(
        "clients/keeping.py",
        STATES + " tests/test_sharing.py tests/test_personalized.py",
        {
            "missing := names - fields.keys()": "missing := names - names",
            "self._found(config, peek)": "self._found(config, settle)",
            "Kept(nonce=fresh_nonce())": "Kept()",
            "    except DamagedState as error:": "    except KeyError as error:",
        },
    ),
    *of(
        "clients/compressing.py",
        "tests/test_compression.py",
        {
            "p = p + memory[number]": "pass",
            "left_out.append(p - codec.decode(": "left_out.append(0 * p - codec.decode(",
        },
    ),
    *of(
        "clients/node/host.py",
        HOSTS,
        {
            "if client not in self._hosted:": "if False:",
            "good[client] = _like(names, arrays, result)": "good[client] = result",
            "array.shape != before.shape or array.dtype != before.dtype": "False",
            'states.get(f"{STATE}-{client}", RecordDict())': "RecordDict()",
            "            del context.state[key]\n": "            pass\n",
            "folded=True, refused=[*refused])": "folded=True)",
        },
    ),
    *of(
        "clients/node/bridge.py",
        "tests/test_bridge.py tests/test_faults.py tests/test_learned_layouts.py",
        {
            "if self._one_each:": "if False:",
            "if legacy or (trains and not is_hosted(message.content)):": "if legacy:",
            "_for_training(mod) if changes_uploads(mod) else mod": "mod",
            "check_names(client, names)": "pass",
        },
    ),
    *of(
        "clients/node/records.py",
        "tests/test_bridge.py tests/test_own_client.py",
        {
            "own_id != int(known)": "False",
            "isinstance(plain, str | bytes | bool)": "isinstance(plain, str | bytes)",
        },
    ),
    *of(
        "clients/node/packing.py",
        "tests/test_workers.py",
        {
            "bytes(-raw.nbytes % 64)": 'b""',
        },
    ),
    *of(
        "clients/derived.py",
        "tests/test_derived.py tests/test_a_fedpd.py",
        {
            '"for_client"), received.catch_up)': '"for_client"), 0.0)',
            '(declared.sent if declared else "") or': "",
            "elif key in config or declared or not": "elif key in config or not",
            "elif key in config or declared or": "elif declared or",
            "self.half.reads[name](config)": "config[key]",
            "if is_ours(strategy) else strategy.__module__": "if True else strategy.__module__",
            "(half.state is None) != (half.first_state is None)": "half.state is None",
        },
    ),
    *of(
        "clients/checks.py",
        "tests/test_mistakes.py tests/test_batches.py",
        {
            "if ours != theirs:": "if False:",
            "if vectors.keys() != {*client.extra_vectors}:": "if False:",
            "if not _finite(step.upload):": "if False:",
            "scalars.keys() & {*taken, *RESERVED}": "scalars.keys() & {*RESERVED}",
            "np.shape(value) != np.shape(was) and": "False and",
            "        if not _finite(value):": "        if False:",
        },
    ),
]
