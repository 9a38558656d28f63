"""The faults that `plant_faults.py` plants: mistakes that a maintainer could make, each against a promise.

A fault is its name, its file below `src`, and the tests that find it, below `tests`, the cheapest first: a file to save
time, and the folder that has it under whatever name. The lines after - are there once; those after + take their place.
"""

PLANTED = """
result-not-synced async_grpo/queue/transitions.py unit/queue
-            if durable:
-                self.files.sync(temporary)

claim-dropped-first async_grpo/queue/worker.py unit/queue/test_queue_protocol.py unit/queue
-        self._moves.publish(encode_group(group), f"queue/{result}", durable=self._durable)
-        self._moves.drop(f"queue/{claim.name}")
+        self._moves.drop(f"queue/{claim.name}")
+        self._moves.publish(encode_group(group), f"queue/{result}", durable=self._durable)

one-try-more async_grpo/queue/transitions.py unit/queue/test_queue_protocol.py unit/queue
- claim.attempt + 1 >= max_attempts
+ claim.attempt + 1 > max_attempts

stopped-keeps-jobs async_grpo/queue/worker.py unit/queue/test_queue_protocol.py unit/queue
-            self.hand_back_all()
+            pass

downtime-counts async_grpo/queue/recovery.py unit/queue/test_queue_restarts.py unit/queue
- recover_dead(root, self._moves, max_attempts, counts=False)
+ recover_dead(root, self._moves, max_attempts)

written-in-place async_grpo/queue/transitions.py chaos/test_queue_faults.py
-            self.files.rename(temporary, to)
+            self.files.create(to, data)

reason-written-last async_grpo/queue/transitions.py chaos/test_queue_faults.py
-        self.publish(_limited(reason), f"quarantine/{reason_name(target)}")
-        return self.move(f"queue/{name}", f"quarantine/{target}")
+        moved = self.move(f"queue/{name}", f"quarantine/{target}")
+        self.publish(_limited(reason), f"quarantine/{reason_name(target)}")
+        return moved

taken-from-the-living async_grpo/queue/recovery.py chaos/test_queue_faults.py
- if not lock.try_acquire():
+ if not lock.try_acquire() and is_far:

used-not-given-back async_grpo/queue/recovery.py chaos/test_queue_faults.py
- if name.state == COMPLETE and not self._is_over(name.seq):
+ if name.state == COMPLETE and self._is_over(name.seq):

result-used-again async_grpo/queue/server.py chaos/test_queue_faults.py
-        self._open.pop(entry.seq, None)
-        self.given_up.pop(entry.seq, None)
+        self.given_up.pop(entry.seq, None)

checksum-not-checked async_grpo/queue/codec.py chaos/test_queue_faults.py
- if data[_CHECKSUM_AT:_CHECKSUM_END] != checksum:
+ if not checksum:

lock-shared async_grpo/rundir/locks.py unit/queue/test_queue_waking.py unit/queue
- fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
+ fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

json-in-place async_grpo/rundir/files.py unit/rundir/test_files.py unit/rundir
-            temporary.write_text(text)
-            temporary.replace(path)
+            path.write_text(text)

stale-by-one async_grpo/training/schedule.py unit/training/test_staleness.py unit/training
- used_at - self.max_staleness <= version
+ used_at - self.max_staleness <= version + 1

resumes-a-version-late async_grpo/training/schedule.py unit/training/test_staleness.py unit/training
- first_version=state.step,
+ first_version=state.step + 1,

seed-of-run-only async_grpo/training/job_issuer.py unit/training/test_rollout_source.py unit/training
- seed_from(f"{run_seed}:{seq}")
+ seed_from(f"{run_seed}")

held-version-replaced async_grpo/training/weight_publisher.py unit/deltas/test_recorder.py unit/deltas unit/training
- if self._due is None or self.held_at is not None:
+ if self._due is None:

ratio-inverted async_grpo/training/corrections/weights.py unit/training/test_corrections.py unit/training
- (log_pi_old - log_mu)
+ (log_mu - log_pi_old)

cap-ignored async_grpo/training/corrections/weights.py unit/training/test_corrections.py unit/training
- ratio.clamp(rule.least, rule.most)
+ ratio.clamp(rule.least)

tool-tokens-counted async_grpo/training/corrections/weights.py unit/training/test_corrections.py unit/training
- return (mask if "tool_mask" not in batch else mask * batch["tool_mask"]).bool()
+ return mask.bool()

trainers-logprobs async_grpo/training/corrections/trl_loss.py unit/training/test_corrections.py unit/training
- batch["old_per_token_logps"] = batch["sampling_per_token_logps"].where(counted, 0.0)
+ batch.setdefault("old_per_token_logps", batch["sampling_per_token_logps"].where(counted, 0.0))

clip-bounds-swapped async_grpo/training/corrections/trl_loss.py unit/training/test_corrections.py unit/training
- Clip(1 - trainer.epsilon_low, 1 + trainer.epsilon_high, sequences)
+ Clip(1 - trainer.epsilon_high, 1 + trainer.epsilon_low, sequences)

weights-of-the-new-policy async_grpo/training/corrections/trl_loss.py integration/test_trl_corrections.py
- old = inputs.get("old_per_token_logps", log_pi)
+ old = log_pi

rows-issued-again async_grpo/training/prompts.py integration/test_rollout_groups.py
- size = batch * trainer.num_iterations * trainer.args.steps_per_generation
+ size = batch

put-back-in-the-prompt async_grpo/setup/pieces.py unit/setup/test_pieces.py unit/setup
- it[:, -keep:]
+ it[:, :keep]

told-of-no-padding async_grpo/setup/pieces.py unit/setup/test_pieces.py unit/setup
- (left, right, unmasked))
+ (left, right))

mean-of-the-batch async_grpo/archive/advantages.py unit/archive/test_groups.py integration/test_trl_contract_loss.py
- [(totals - _mean(totals)) /
+ [(totals - _mean(np.concatenate(each))) /

gae-without-lambda async_grpo/credit/gae.py unit/credit/test_gae.py unit/credit
- error + gamma * lam * advantage_after
+ error + gamma * advantage_after

lesser-value-loss async_grpo/credit/gae.py unit/credit/test_gae.py unit/credit
- torch.max(errors, clipped)
+ torch.min(errors, clipped)

whitened-with-padding async_grpo/credit/gae.py unit/credit/test_gae.py unit/credit
- everywhere(advantages[counts])
+ everywhere(advantages.flatten())

kl-rewarded async_grpo/credit/ppo.py integration/test_ppo_trainer.py
- scores - self._penalty(output, mask)
+ scores + self._penalty(output, mask)

task-gradients-too-small async_grpo/tasks/gradients.py unit/tasks/test_gradients.py unit/tasks
- return weights if method == "pcgrad" else len(there) * weights
+ return weights

logprobs-without-temperature async_grpo/engines/decoding.py unit/engines/test_transformers_engine.py unit/engines
- logits_bV.float() / self._temperature
+ logits_bV.float()

end-token-not-counted async_grpo/engines/decoding.py unit/engines/test_decoding.py unit/engines
-        self.lengths_B += self._going_B
-        self._going_B &= ~self._criteria(self._sequences_BL[:, : self._position + 1], None)
+        self._going_B &= ~self._criteria(self._sequences_BL[:, : self._position + 1], None)
+        self.lengths_B += self._going_B

top-p-off async_grpo/engines/transformers.py unit/engines/test_transformers_engine.py unit/engines
- for name in ("top_p", "top_k", "min_p"):
+ for name in ("top_k", "min_p"):

samples-with-old-weights async_grpo/rollout/worker.py unit/rollout/test_worker.py unit/rollout
- if version is not None and claim.job.min_version <= version]
+ if version is not None]

lease-not-released async_grpo_ipc/attachment.py unit/ipc/test_ipc_share.py unit/ipc
-        if not self._held[lease.slot]:
+        if self._held[lease.slot]:

newest-overwritten async_grpo_ipc/exporter.py unit/ipc/test_ipc_share.py unit/ipc
- is_newest = slot == self._current and len(self._in_slots) > 1
+ is_newest = False

read-without-a-lease async_grpo_ipc/attachment.py chaos/test_weights_faults.py
- if not self._control.locks.try_lock(FIRST_SLOT_BYTE + wanted.slot, shared=True):
+ if not FIRST_SLOT_BYTE:

written-unlocked async_grpo_ipc/exporter.py chaos/test_weights_faults.py
-            self._mark(slot, SlotState.WRITING, version)
+            self._release_slot(slot)

not-aligned async_grpo_ipc/layout.py unit/ipc/test_ipc_layout.py unit/ipc
- offset = align(offset + spec.nbytes)
+ offset = offset + spec.nbytes

key-not-redacted async_grpo/redaction.py unit/test_redaction.py
- r"hf_[A-Za-z0-9]{16,}|api_org_\\w{8,}",
+ r"api_org_\\w{8,}",

delta-not-verified async_grpo/deltas/delta.py unit/deltas/test_delta.py unit/deltas
- if found != delta.header.result:
+ if not found:

used-twice-unsaid async_grpo/archive/audit.py unit/archive/test_audit.py unit/archive
- if len(all_uses) > 1:
+ if len(all_uses) > 2:

evaluated-twice async_grpo/evals/evaluation.py unit/evals/test_evaluation.py unit/evals
- if not self._every or version in self._ledger.steps or not (
+ if not self._every or not (

ledger-forgotten async_grpo_experiments/slots/ledger.py unit/slots unit/sweeps
- self.records = read(path)
+ self.records: dict[str, Record] = {}

doctor-silent async_grpo/checks/doctor/machine.py unit/checks/test_doctor.py unit/checks
- elif not requirement.specifier.contains(have, prereleases=True):
+ elif have not in requirement.specifier and Version(have).is_prerelease:

one-restart-more async_grpo/launch/supervisor.py unit/launch/test_supervisor.py unit/launch
- self._restarts_in_a_row < MAX_RESTARTS_IN_A_ROW
+ self._restarts_in_a_row <= MAX_RESTARTS_IN_A_ROW

damaged-checkpoint-resumed async_grpo/archive/checkpoint_folders.py unit/archive/test_checkpoint_folders.py unit/archive
-        _check_whole(newest)
+        pass
"""
