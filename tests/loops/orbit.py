"""Orbit's tutorial, BERT on pairs of sentences, on the data of tests/tasks/bert.py, with as much of Orbit as it uses.

Names and order of tensorflow.org/tfmodels/orbit and of orbit's standard_runner.py and controller.py, whose package
needs an environment of its own. What was fixed is marked; docs/porting.md says why.
"""

import keras
import numpy as np
import tensorflow as tf

from ports import sentences


class StandardTrainer:
    def __init__(self, train_dataset):
        self._train_iter = iter(train_dataset)
        self._train_loop_fn = tf.function(self._loop)

    def _loop(self, iterator, num_steps):
        for _ in tf.range(num_steps):
            self.train_step(iterator)

    def train(self, num_steps):
        self.train_loop_begin()
        self._train_loop_fn(self._train_iter, num_steps)
        return self.train_loop_end()


class StandardEvaluator:
    def __init__(self, eval_dataset):
        self.eval_dataset = eval_dataset
        self._eval_fn = tf.function(self.eval_step)

    def evaluate(self, num_steps):
        self.eval_begin()
        iterator = iter(self.eval_dataset)
        for _ in range(num_steps):
            self._eval_fn(iterator)
        return self.eval_end()


class Controller:
    def __init__(self, *, trainer, evaluator, global_step, steps_per_loop, train_actions):
        self.trainer, self.evaluator, self.global_step = trainer, evaluator, global_step
        self.steps_per_loop, self.train_actions = steps_per_loop, train_actions

    def train(self, steps):
        while (current_step := int(self.global_step.numpy())) < steps:
            num_steps = min(steps - current_step, self.steps_per_loop(current_step))
            output = self.trainer.train(tf.constant(num_steps))
            for action in self.train_actions:
                action(num_steps, output)

    def train_and_evaluate(self, train_steps, eval_steps, eval_interval):
        while (current_step := int(self.global_step.numpy())) < train_steps:
            self.train(min(train_steps, current_step + eval_interval))
            yield self.evaluator.evaluate(eval_steps)


class BertClassifierTrainer(StandardTrainer):
    def __init__(self, train_dataset, model, optimizer, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.model, self.optimizer, self.global_step = model, optimizer, optimizer.iterations
            self.train_loss = keras.metrics.Mean("training_loss")
        super().__init__(train_dataset)

    def train_loop_begin(self):
        self.train_loss.reset_state()

    def train_step(self, iterator):
        def step_fn(inputs):
            labels = inputs.pop("label_ids")
            with tf.GradientTape() as tape:
                model_outputs = self.model(inputs, training=True)
                raw_loss = loss_fn(labels, model_outputs)
                loss = raw_loss / self.strategy.num_replicas_in_sync
            grads = tape.gradient(loss, self.model.trainable_variables)
            # As tf-models' AdamWeightDecay does. FIXED: whole tensors, because Keras's AdamW squares slices one by one.
            grads, _ = tf.clip_by_global_norm([tf.convert_to_tensor(each) for each in grads], 1.0)
            self.optimizer.apply_gradients(zip(grads, self.model.trainable_variables, strict=True))
            self.train_loss.update_state(raw_loss)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        return {"training_loss": float(self.train_loss.result())}


class BertClassifierEvaluator(StandardEvaluator):
    def __init__(self, eval_dataset, model, strategy):
        self.strategy, self.model = strategy, model
        with strategy.scope():
            self.eval_loss = keras.metrics.Mean("evaluation_loss")
            self.eval_accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
        super().__init__(eval_dataset)

    def eval_begin(self):
        self.eval_accuracy.reset_state()
        self.eval_loss.reset_state()

    def eval_step(self, iterator):
        def step_fn(inputs):
            labels = inputs.pop("label_ids")
            model_outputs = self.model(inputs, training=False)  # FIXED: it says True.
            self.eval_loss.update_state(loss_fn(labels, model_outputs))
            self.eval_accuracy.update_state(labels, model_outputs)

        self.strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self):
        return {
            "validation/accuracy": float(self.eval_accuracy.result()),
            "validation/loss": float(self.eval_loss.result()),
        }


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """The rate of tf-models' create_optimizer: at the end of the warm-up the decay has come down from the start."""

    def __init__(self, init_lr, num_train_steps, num_warmup_steps):
        self.init_lr, self.num_warmup_steps = init_lr, num_warmup_steps
        self.decay_schedule_fn = keras.optimizers.schedules.PolynomialDecay(init_lr, num_train_steps, 0.0)

    def __call__(self, step):
        percent_done = tf.cast(step, tf.float32) / self.num_warmup_steps
        return tf.where(percent_done < 1.0, self.init_lr * percent_done, self.decay_schedule_fn(step))


def loss_fn(labels, logits):
    log_probs = tf.nn.log_softmax(logits, axis=-1)
    per_example_loss = -tf.reduce_sum(tf.one_hot(labels, depth=2) * log_probs, axis=-1)
    return tf.reduce_mean(per_example_loss)


def read(split):
    """Returns the fields of the pairs of a split, in columns."""
    tokens, labels = sentences(split)
    mask = (tokens > 0).astype("int32")
    segments = np.concatenate([np.zeros_like(tokens[:, :7]), mask[:, 7:]], axis=1)
    return {"input_ids": tokens, "input_mask": mask, "segment_ids": segments, "label_ids": labels}


def run(task, settings, strategy, train_datasets, evaluation_datasets):
    """Returns how many steps each loop took and their mean loss, the metrics of each epoch, and the model."""
    steps_per_epoch = int(train_datasets[0].cardinality())
    train_steps = steps_per_epoch * len(train_datasets)
    first, second = train_datasets  # Two epochs.
    with strategy.scope():
        model = task.create_model()
        optimizer = keras.optimizers.AdamW(
            WarmUp(settings.learning_rate, train_steps, int(train_steps * 0.1)), weight_decay=0.01, epsilon=1e-6
        )
        optimizer.exclude_from_weight_decay(var_names=["layer_norm", "gamma", "beta", "bias"])
        optimizer.build(model.trainable_variables)
    trainer = BertClassifierTrainer(
        strategy.experimental_distribute_dataset(first.concatenate(second)), model, optimizer, strategy
    )
    eval_dataset = strategy.experimental_distribute_dataset(evaluation_datasets["validation"])
    losses = []
    controller = Controller(
        trainer=trainer,
        evaluator=BertClassifierEvaluator(eval_dataset, model, strategy),
        global_step=trainer.global_step,
        # The first epoch step by step, so that each loss is seen.
        steps_per_loop=lambda step: 1 if step < steps_per_epoch else 4,
        train_actions=[lambda count, output: losses.append((count, output["training_loss"]))],
    )
    eval_steps = int(evaluation_datasets["validation"].cardinality())
    rows = list(controller.train_and_evaluate(train_steps, eval_steps, eval_interval=steps_per_epoch))
    return losses, rows, model
